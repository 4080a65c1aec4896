"""`find`: the residual streams of a model, without changing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from resfx.capture import capture, check_module, example_call
from resfx.captured import Captured
from resfx.patterns import ResidualMap, search
from resfx.provenance import already, forms_of, rewritten_forms


def find(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    frontend: str = "export",
    unweighted: bool = False,
) -> ResidualMap:
    """Find the residual connections of `model` as one call `model(*args, **kwargs)` runs them.

    Args follow torch.export.export. `unweighted`: branches without a Parameter count as sites too. An empty map is a result, not
    an error; its `rejected` tells why. The model is not changed. Errors: NotAModule, CaptureError, DynamicDimSpecialized.
    """
    check_module(model)
    flat = capture(model, *example_call(args, kwargs), dynamic_shapes=dynamic_shapes, frontend=frontend)
    found = search(flat.graph_module, unweighted=unweighted)
    if flat.untraced is not None and not found.streams:
        raise flat.untraced
    modules = tuple(path for path, _ in model.named_modules(remove_duplicate=False))
    notes = capture_notes(flat)
    earlier = rewritten_forms(flat.graph)
    if earlier:
        notes.append(already(earlier))
    forms = forms_of(found.streams, flat.graph)
    return ResidualMap(found.streams, found.rejected, notes, forms=forms, modules=modules)


def capture_notes(captured: Captured) -> list[str]:
    """What the capture has to say, the input dimensions that stayed fixed included."""
    if not captured.fixed_dims:
        return list(captured.notes)
    fixed = ", ".join(f"{name}[{axis}]" for name, axis in captured.fixed_dims)
    return [*captured.notes, f"input dimensions fixed by the model: {fixed}"]
