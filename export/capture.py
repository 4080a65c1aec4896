"""torch.export of a model with every size left open that the model leaves open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from resfx.export.blame import blame, first_line
from resfx.export.call import Call
from resfx.export.compare import compare, tolerance_for
from resfx.export.errors import DynamicDimError, OutputMismatchError, TraceError
from resfx.export.fixed_sizes import fixed_sizes
from resfx.export.outputs import flatten_outputs
from resfx.export.quiet import quiet_failure
from resfx.export.run import FlatModule, preserved_buffers, run_eager
from resfx.export.sizes import Sizes, Spec, asks, flat_spec, open_all, sizes_of, widened
from resfx.patterns.errors import ResfxError

_FIXED = "fixed"  # in place of dynamic_shapes: every size as in the example


@dataclass(frozen=True, eq=False)
class Capture:
    """An exported model: its program, its input sizes, the spec it was asked for and what had to give."""

    program: ExportedProgram
    sizes: Sizes
    spec: Spec
    notes: tuple[str, ...]


def capture(model: nn.Module, call: Call, dynamic_shapes: Any = None, *, flat: bool) -> Capture:
    """Export `model` for the tensors of `call`: as a FlatModule (`flat`) or with the model's own signature.

    An example batch of 1 is captured as 2 where the result still serves the example; sizes are fixed where no open
    export exists. Raises TraceError, or DynamicDimError where the model fixes a size that `dynamic_shapes` asked for.
    """
    wide = widened(call)
    if wide is not None:
        found = _try_wide(model, call, wide, dynamic_shapes, flat)
        if found is not None:
            return found
    notes = () if wide is None else ("no one graph serves 1 row and more: the example's batch of 1 is fixed",)
    try:
        return _capture(model, call, dynamic_shapes, flat, notes)
    except DynamicDimError as error:
        places = fixed_sizes(model, call, flat_spec(model, call, dynamic_shapes))
        raise DynamicDimError("\n".join([str(error), *places])) from error.__cause__
    except TraceError as error:
        if dynamic_shapes is not None:
            raise
        reason = first_line(error.__cause__ or error)
        try:
            return _capture(model, call, _FIXED, flat, (*notes, f"all sizes are fixed: open ones failed with {reason}"))
        except TraceError:
            raise error from error.__cause__  # the first one tells more


def _try_wide(model: nn.Module, call: Call, wide: Call, wish: Any, flat: bool) -> Capture | None:
    """The export at two rows, if it also holds for the example's one row."""
    try:
        found = _capture(model, wide, wish, flat, ())
    except TraceError:
        return None
    if not found.sizes.fits(call.tensors):
        return None
    want = run_eager(model, call)
    _, args, kwargs = _subject(model, call, [tensor.clone() for tensor in call.tensors], flat)
    try:
        with preserved_buffers(model), torch.no_grad():
            got = flatten_outputs(found.program.module(check_guards=False)(*args, **kwargs)).tensors
        compare(want.names, got, want.tensors, tolerance_for(want.tensors), "the graph captured at two rows")
    except (OutputMismatchError, RuntimeError, ValueError):
        return None
    return found


def _capture(model: nn.Module, call: Call, wish: Any, flat: bool, notes: tuple[str, ...]) -> Capture:
    module, args, kwargs = _subject(model, call, call.tensors, flat)
    spec = _spec(model, call, wish, flat)
    shapes = {"tensors": spec} if flat and spec else spec or None
    program = trace(module, model, args, kwargs, shapes, asked=asks(spec))
    return Capture(program, sizes_of(program), spec, notes)


def _subject(
    model: nn.Module, call: Call, tensors: Sequence[Tensor], flat: bool
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """What torch.export gets: the module and its arguments."""
    if flat:
        return FlatModule(model, call), tuple(tensors), {}
    return model, *call.rebuild(tensors)


def _spec(model: nn.Module, call: Call, wish: Any, flat: bool) -> Spec:
    """The spec for the subject's arguments: one entry a tensor where `flat`, else by the model's argument names."""
    if wish == _FIXED:
        return (None,) * len(call.tensors) if flat else None
    if flat:
        return flat_spec(model, call, wish)
    return open_all(call.bound) if wish is None else wish


def trace(
    module: nn.Module,
    blamed: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    asked: bool,
) -> ExportedProgram:
    """torch.export.export with the errors of this package; `blamed` is the model that messages name paths of."""
    try:
        with preserved_buffers(module), torch.no_grad(), quiet_failure():
            return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:  # torch.export lets every kind of error through, the model's own included
        if asked and "onstraints violated" in str(error):
            raise DynamicDimError(
                "a size asked to be dynamic is fixed by the model: leave it out of dynamic_shapes, use Dim.AUTO, "
                f"or change the code that fixes it.\n{_constraints(str(error))}"
            ) from error
        stopped = f"torch.export stopped{blame(error, blamed)}: {first_line(error)}"
        if isinstance(error, ResfxError):  # it says what to do itself
            raise TraceError(stopped) from error
        raise TraceError(
            f"{stopped}\nData-dependent control flow needs torch.cond or torch.where; an output of an unknown type (a cache) "
            "can be switched off by the model's own arguments, or left out by a module that wraps it."
        ) from error


def _constraints(text: str) -> str:
    """The lines of torch's message on violated constraints that name the sizes."""
    named = [line.strip() for line in text.splitlines() if line.startswith("  - ")]
    return "\n".join(named) or text
