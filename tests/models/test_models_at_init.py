"""`at_init` is kept by every form on every model; a warm start is the model itself, and all that is new soon learns.

- identical: the same function. scaled: the same, up to a factor and the norms' eps, where every branch reads the stream
  through a norm; elsewhere nothing is promised. different: another function.

What is new learns from float64 gradients: where a read starts as a multiple of the plain state and a norm follows, all that the
blend of a warm start can tell is the norm's eps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models_steps import distance, loss_of, outputs, run
from models_zoo import ZOO
from new_parameters import new_parameters
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import resfx

FORMS: list[resfx.Form] = [
    resfx.DeltaAttention(),
    resfx.AttentionResidual(),
    resfx.MultiGate(streams=2),
    resfx.Review(),
    resfx.DeltaAttention(gate="alpha", null_source=True),
    resfx.Highway(),
    resfx.DeltaAttention(granularity="block", block_size=2),
    resfx.AttentionResidual(granularity="block", block_size=2),
    resfx.Highway(convex=True),
    resfx.DeltaAttention(tied=True),
    resfx.ScaledLoop(learnable=True),
    resfx.Standard(),
    resfx.AttentionResidual(query_init_std=0.5),
]
# Every branch reads the stream through a norm of each token; so does what follows a stream's end, or nothing does.
PRE_NORM = {
    "nanogpt",
    "gpt2",
    "llama",
    "qwen3",
    "gemma2",
    "gpt_neox",
    "falcon",
    "mixtral",
    "vit",
    "t5",
    "torchvision_vit",
    "torchvision_swin",
    "timm_vit",
    "timm_test_vit",
    "timm_swin",
    "timm_cait",
    "transformer_encoder_pre",
}
# A norm of each token follows every sum: a gate that halves both of its terms changes nothing.
POST_NORM = {"bert", "albert", "transformer_encoder"}
EPS_NAMES = ("eps", "variance_epsilon")


def cases() -> Iterator[Any]:
    """Every (model, form, start). The default run: one form a model in rotation, its starts in turn."""
    for number, (name, entry) in enumerate(ZOO.items()):
        for position, form in enumerate(FORMS):
            for turn, start in enumerate(("warm", "plain")):
                chosen = position == number % len(FORMS) and turn == number % 2 and not entry.heavy
                marks = [] if chosen else [pytest.mark.slow]
                yield pytest.param(name, form, start == "warm", id=f"{name}-{form.to_spec()}-{start}", marks=marks)


def without_eps(model: nn.Module) -> nn.Module:
    """What stands between "scaled" and equal."""
    for module in model.modules():
        for name in EPS_NAMES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 1e-12)
    return model


def normalised(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {path: value / value.norm() for path, value in found.items()}


@pytest.mark.parametrize(("name", "form", "warm"), list(cases()))
def test_at_init(name: str, form: resfx.Form, warm: bool) -> None:
    model, args, kwargs = ZOO[name].build()
    halved = form == resfx.Highway(convex=True) and name in POST_NORM
    scaled = not warm and (halved or (form.at_init == "scaled" and name in PRE_NORM))
    if scaled:
        without_eps(model)
    result = resfx.rewrite(model, form, args, kwargs, warm_start=warm)
    assert result.residual_map.refused == {}
    got, want = outputs(result, args, kwargs), outputs(model, args, kwargs)
    if warm or form.at_init == "identical":
        assert distance(got, want) < 1e-5
    elif scaled:
        assert distance(normalised(got), normalised(want)) < 1e-5
    elif form.at_init == "different":
        assert distance(got, want) > 1e-3
    if warm:
        exact, args, kwargs = doubled(name)
        result = resfx.rewrite(exact, form, args, kwargs, warm_start=True)
        assert learning(result, args, kwargs) == set(new_parameters(result))


def doubled(name: str) -> tuple[nn.Module, Any, Any]:
    """The model and its inputs in float64."""
    model, args, kwargs = ZOO[name].build()
    args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, (args, kwargs))
    return model.double(), args, kwargs


def learning(model: nn.Module, args: Any, kwargs: Any) -> set[str]:
    """The new parameters that have had a gradient by the third backward."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)  # whose steps no gradient makes large
    seen: set[str] = set()
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(run(model, args, kwargs)).backward()
        new = new_parameters(model)
        seen |= {name for name, p in new.items() if p.grad is not None and float(p.grad.abs().max()) > 0}
        optimizer.step()
    return seen


def test_the_names_exist() -> None:
    assert set(ZOO) >= PRE_NORM | POST_NORM
