"""Capture: nn.Module -> flat graph -> folded graph on the user's own module tree.

`capture` gives the flat graph in which the search finds the sites. `capture_folded` captures again, calls back with
that second flat graph, and folds every leaf module into one `call_module` of the user's own instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from resfx.capture_errors import CaptureError, DynamicDimSpecialized, GuardError, NotAModule
from resfx.captured import Captured, Mode, ModuleCall
from resfx.export_capture import export_flat
from resfx.folded_capture import Folded, capture_folded
from resfx.fx_route import fx_flat
from resfx.graphed import GraphedModule
from resfx.inert import leave_casts
from resfx.keywords import speak_keywords
from resfx.signature import forward_signature

__all__ = [
    "CaptureError",
    "Captured",
    "DynamicDimSpecialized",
    "Folded",
    "GraphedModule",
    "GuardError",
    "ModuleCall",
    "NotAModule",
    "capture",
    "capture_folded",
]


def check_module(model: Any) -> nn.Module:
    """Raises NotAModule for anything that is no nn.Module."""
    if isinstance(model, torch.jit.ScriptModule):
        raise NotAModule(
            "the model is a TorchScript module, which can't be captured: pass the nn.Module it was made from"
        )
    if isinstance(model, nn.Module):
        return model
    what = f"the class `{model.__name__}`, not an instance" if isinstance(model, type) else f"a {type(model).__name__}"
    raise NotAModule(
        f"expected a torch.nn.Module, got {what}. Pass the module itself; a function fits into an nn.Module's forward."
    )


def example_call(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example call as a tuple and a dict. Raises CaptureError for anything else."""
    if isinstance(args, (torch.Tensor, str)) or not isinstance(args, Sequence):
        raise CaptureError(f"args must be a tuple, got a {type(args).__name__}: write (x,) for one argument")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise CaptureError(f"kwargs must be a dict of keyword arguments, got a {type(kwargs).__name__}")
    return _with_gradients((tuple(args), dict(kwargs or {})))


def _with_gradients(example: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copies of the tensors that were made in inference mode, which no gradient can be followed through."""
    if not any(isinstance(leaf, torch.Tensor) and leaf.is_inference() for leaf in pytree.tree_leaves(example)):
        return example
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.clone() if t.is_inference() else t, example)
    return args, kwargs


def capture(
    model: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    frontend: str = "export",
    mode: Mode = "eval",
) -> Captured:
    """The model as one flat, functional graph on its own parameters; the model itself stays as it was.

    Args follow torch.export.export; by default every dimension the model leaves open stays open.
    Raises NotAModule, DynamicDimSpecialized (a dimension asked for in `dynamic_shapes` is fixed by the model) and
    CaptureError (with the failing source line).
    """
    module = check_module(model)
    arguments = (tuple(args), dict(kwargs or {}))
    _refuse_unknown_keywords(module, arguments[1])
    speak_keywords(module)
    if frontend == "export":
        _refuse_inference_weights(module)
        captured = export_flat(module, *arguments, dynamic_shapes, mode).captured
        leave_casts(captured.graph)
        return captured
    if frontend == "fx":
        if dynamic_shapes is not None:
            raise CaptureError("dynamic_shapes belongs to frontend='export'; the fx frontend leaves every size open")
        return fx_flat(module, *arguments, mode)
    raise CaptureError(f"unknown frontend {frontend!r}: choose 'export' or 'fx'")


def _refuse_unknown_keywords(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """A misspelled name: Python itself speaks of the argument that is then missing."""
    parameters = forward_signature(module).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = next((name for name in kwargs if name not in parameters), None)
    if unknown is not None:
        raise CaptureError(
            f"{type(module).__name__}.forward has no argument {unknown!r}; its arguments are {', '.join(parameters) or 'none'}"
        )


def _refuse_inference_weights(module: nn.Module) -> None:
    """torch.export follows gradients, and so does the result."""
    name = next((name for name, weight in module.named_parameters() if weight.is_inference()), None)
    if name is not None:
        raise CaptureError(
            f"the parameter `{name}` was made inside torch.inference_mode() and can have no gradient: build or load the"
            " model outside of it, or let rewrite copy it. The result runs inside it."
        )
