"""Capture: nn.Module -> flat graph -> folded graph on the user's own module tree.

`capture` gives the flat graph in which the search finds the sites. `capture_folded` captures again, calls back with
that second flat graph, and folds every leaf module into one `call_module` of the user's own instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from resfx.capture_errors import CaptureError, DynamicDimSpecialized, GuardError, NotAModule
from resfx.captured import Captured, Mode, ModuleCall
from resfx.export_capture import export_flat
from resfx.folded_capture import Folded, capture_folded
from resfx.fx_route import fx_flat
from resfx.graphed import GraphedModule
from resfx.inert import leave_casts
from resfx.keywords import speak_keywords

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
    return tuple(args), dict(kwargs or {})


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
    speak_keywords(module)
    if frontend == "export":
        captured = export_flat(module, *arguments, dynamic_shapes, mode).captured
        leave_casts(captured.graph)
        return captured
    if frontend == "fx":
        if dynamic_shapes is not None:
            raise CaptureError("dynamic_shapes belongs to frontend='export'; the fx frontend leaves every size open")
        return fx_flat(module, *arguments, mode)
    raise CaptureError(f"unknown frontend {frontend!r}: choose 'export' or 'fx'")
