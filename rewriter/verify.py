"""Does the captured graph compute what the model computes? Checked once, before anything is rewritten."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from resfx.capture_errors import CaptureError
from resfx.captured import Captured
from resfx.environment import training_mode
from resfx.failure import captured_failure, example_failure
from resfx.foreign_draws import kept_generators

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


def verify_capture(model: nn.Module, captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Run both in eval mode on the example inputs, with the same random numbers.

    Errors: CaptureError naming the first difference, or where the model itself fails.
    Models on the meta device hold no numbers and are not run.
    """
    if not has_numbers(model):
        return
    expected = _leaves(example_run(model, args, kwargs))  # fake tensors may pass over what a kernel refuses
    actual = _leaves(_captured_run(captured, args, kwargs))
    compared = {path: value for path, value in expected.items() if path in actual}
    for path, value in compared.items():
        _compare(path, value, actual[path])
    if not compared and expected:
        raise CaptureError("the captured graph returns none of the model's output tensors")


def computes_the_same(model: nn.Module, captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Does `verify_capture` pass? Not where the model does not run: a capture of this very example tells why."""
    try:
        verify_capture(model, captured, args, kwargs)
    except Exception:
        return False
    return True


def has_numbers(model: nn.Module) -> bool:
    """Is no part of it on the meta device?"""
    return all(p.device.type != "meta" for p in chain(model.parameters(), model.buffers()))


def trial_run(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The output in eval mode, always with the same random numbers; module and arguments stay as they were."""
    device = next((p.device for p in module.parameters() if p.device.type != "cpu"), None)
    args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, (tuple(args), dict(kwargs)))
    with (
        training_mode(module, "eval"),
        _kept_buffers(module),
        kept_generators(),
        torch.no_grad(),
        torch.random.fork_rng([device] if device else [], enabled=True),
    ):
        torch.manual_seed(0)
        return module(*args, **kwargs)


def example_run(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`trial_run` of the user's own model. Errors: CaptureError that says that it is the model itself that fails."""
    try:
        return trial_run(model, args, kwargs)
    except Exception as error:
        raise example_failure(error, model) from error


def _captured_run(captured: Captured, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Errors: CaptureError where the captured graph fails on what the model itself ran on."""
    try:
        return trial_run(captured.graph_module, args, kwargs)
    except Exception as error:
        raise captured_failure(error, captured.graph_module) from error


def _leaves(output: Any) -> dict[str, torch.Tensor]:
    leaves = pytree.tree_flatten_with_path(output)[0]
    return {pytree.keystr(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


@contextlib.contextmanager
def _kept_buffers(module: nn.Module) -> Iterator[None]:
    """A model that counts its calls or updates statistics in a buffer starts both runs from the same values."""
    owners = [(owner, name, buffer) for owner in module.modules() for name, buffer in owner._buffers.items()]
    values = [None if buffer is None else buffer.clone() for _, _, buffer in owners]
    try:
        yield
    finally:
        for (owner, name, buffer), value in zip(owners, values, strict=True):
            if buffer is not None and value is not None and not torch.equal(buffer, value):
                buffer.copy_(value)
            owner._buffers[name] = buffer


def _compare(path: str, expected: torch.Tensor, actual: torch.Tensor) -> None:
    where = f"output{path}"
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        raise CaptureError(
            f"the captured graph's {where} is {actual.dtype} {tuple(actual.shape)}, the model's {expected.dtype} {tuple(expected.shape)}"
        )
    if torch.equal(expected, actual):
        return
    a, b = (
        t.detach().to(torch.complex128 if t.is_complex() else torch.float64).nan_to_num() for t in (expected, actual)
    )
    difference = float((a - b).norm() / a.norm().clamp_min(1e-12))
    if difference > _TOLERANCE.get(expected.dtype, 1e-5):
        raise CaptureError(
            f"the captured graph's {where} differs from the model's by {difference:.1e} (relative norm) on the example inputs. "
            "The model may depend on state outside its parameters, on data, or on an example size of 1 (captured at 2): "
            "pass a larger or another example, or frontend='fx'."
        )
