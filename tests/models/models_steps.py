"""What the tests of the matrix share: forms, runs, distances, perturbations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models_zoo import ZOO
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import resfx

FORMS: dict[str, Callable[[], resfx.Form]] = {
    "delta": resfx.DeltaAttention,
    "review": resfx.Review,
    "scaled_loop": resfx.ScaledLoop,
}


# Where transformers returns a key/value cache or a state, which a rewritten model does not keep.
CACHE_FIELDS = {"past_key_values", "cache", "cache_params"}


def cases() -> Iterator[Any]:
    """Every (model, form, start). The default run: one form a model in rotation, warm; the small models plain too."""
    for number, (name, entry) in enumerate(ZOO.items()):
        for position, form in enumerate(FORMS):
            for start in ("warm", "plain"):
                in_turn = position == number % len(FORMS) and not entry.heavy
                chosen = in_turn and (start == "warm" or entry.small)
                marks = [] if chosen else [pytest.mark.slow]
                yield pytest.param((name, form, start), id=f"{name}-{form}-{start}", marks=marks)


def pairs() -> Iterator[Any]:
    """Every (model, form). The default run takes one form in rotation for the small models."""
    for number, (name, entry) in enumerate(ZOO.items()):
        for position, form in enumerate(FORMS):
            chosen = entry.small and position == number % len(FORMS)
            yield pytest.param(name, form, id=f"{name}-{form}", marks=[] if chosen else [pytest.mark.slow])


def run(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The output's floating tensors by their place in it, without a key/value cache."""
    leaves = pytree.tree_flatten_with_path(model(*args, **kwargs))[0]
    named = {
        pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }
    return {path: value for path, value in named.items() if not any(field in path for field in CACHE_FIELDS)}


@torch.no_grad()
def outputs(model: nn.Module, args: Any, kwargs: Any, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return run(model, args, kwargs)


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """The largest relative norm over the outputs, which must have the same names, shapes and dtypes."""
    described = [{path: (value.shape, value.dtype) for path, value in each.items()} for each in (got, want)]
    assert described[0] == described[1]
    assert want, "no floating output"
    assert all(torch.isfinite(value).all() for value in (*got.values(), *want.values()))
    return max(float((got[path].double() - want[path].double()).norm() / want[path].double().norm()) for path in want)


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[path], want[path]) for path in want)


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[nn.Module]:
    """The model's parameters, buffers and mode come back as they were."""
    kept, training = {name: value.detach().clone() for name, value in model.state_dict().items()}, model.training
    try:
        yield model
    finally:
        model.load_state_dict(kept)
        model.train(training)
        model.zero_grad()


def loss_of(found: dict[str, Tensor]) -> Tensor:
    """A scalar that depends on every element with a weight of its own."""
    parts = [value.double().flatten() for value in found.values()]
    return torch.stack([(part * torch.linspace(-1, 1, part.numel(), dtype=part.dtype)).sum() for part in parts]).sum()
