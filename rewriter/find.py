"""`find`: the residual streams of a model, without changing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from resfx.capture import CaptureError, capture, check_module, example_call
from resfx.captured import capture_notes
from resfx.parts import Part, parts_note, parts_of, rejected_in
from resfx.patterns import ResidualMap, search
from resfx.provenance import already, forms_of, rewritten_forms
from resfx.rewritten import is_attached


@torch.inference_mode(False)  # a capture follows gradients
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
    an error; its `rejected` tells why. The model is not changed. One whose own forward can't be
    traced is searched part by part, as the map's notes say. Errors: NotAModule, CaptureError, DynamicDimSpecialized.
    """
    check_module(model)
    if is_attached(model):
        raise CaptureError(f"the {type(model).__name__} is attached (resfx.attach): resfx.detach it before a search")
    call = example_call(args, kwargs)
    try:
        flat = capture(model, *call, dynamic_shapes=dynamic_shapes, frontend=frontend)
        found = search(flat.graph_module, unweighted=unweighted)
        if flat.untraced is not None and not found.streams:
            raise flat.untraced
    except CaptureError as error:
        parts = parts_of(model, *call, unweighted) if dynamic_shapes is None and frontend == "export" else []
        if not parts:
            raise
        return _map_of(model, parts, error)
    modules = tuple(path for path, _ in model.named_modules(remove_duplicate=False))
    notes = capture_notes(flat)
    earlier = rewritten_forms(flat.graph)
    if earlier:
        notes.append(already(earlier))
    forms = forms_of(found.streams, flat.graph)
    return ResidualMap(found.streams, found.rejected, notes, forms=forms, modules=modules)


def _map_of(model: nn.Module, parts: Sequence[Part], error: CaptureError) -> ResidualMap:
    streams = [stream for part in parts for stream in part.streams]
    modules = tuple(path for path, _ in model.named_modules(remove_duplicate=False))
    notes = [parts_note(model, [part.path for part in parts], error), *(note for part in parts for note in part.notes)]
    return ResidualMap(streams, rejected_in(parts), notes, modules=modules)
