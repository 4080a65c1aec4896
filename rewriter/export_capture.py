"""The export route from end to end: attempts over dynamic shapes, unlifting, functionalising, calling convention."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from resfx import libraries
from resfx.caches import cache_notes
from resfx.calling import CallCodeGen
from resfx.capture_errors import CaptureError, DynamicDimSpecialized, GuardError
from resfx.captured import Captured, Mode
from resfx.dynamic import Attempt, asked_dims, attempts, canonical_call
from resfx.eager_calls import export_around, second_route
from resfx.environment import capturing
from resfx.export.quiet import quiet_failure
from resfx.export_route import Unlifted, input_guards, unlift
from resfx.failure import capture_failure, forget, is_data_dependent, is_unknown_output
from resfx.foreign_draws import refused_draws
from resfx.guards import fixed_size, parameter_dtypes
from resfx.signature import CallSignature, Constant, Items, Template, forward_signature, input_templates, slot_labels
from resfx.verify import computes_the_same, example_run, has_numbers

ONE_NOTE = "the model treats a size of 1 apart: it was captured at the example's own sizes"
CHECKPOINT_NOTE = "activation checkpoints in the glue are not kept: the result does not recompute there"
_EAGER_NOTE = "kept eager, for it can't be traced; residual connections inside are not searched: {}"


@dataclass
class Exported:
    """One export: the program and its flat graph."""

    program: torch.export.ExportedProgram
    unlifted: Unlifted
    captured: Captured


def export_flat(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    mode: Mode,
    preserve: Sequence[str] = (),
    only: Attempt | None = None,
) -> Exported:
    """Export in `mode`. `preserve` names the leaves whose call signatures are kept, `only` fixes the attempt."""
    parameters = forward_signature(model)
    try:
        args, kwargs = canonical_call(parameters, args, kwargs)
    except TypeError as error:
        raise capture_failure(error, model, "export") from error
    asked = asked_dims(dynamic_shapes, parameters, args, kwargs)
    seen_checkpoints: list[str] = []
    with capturing(model, mode, seen_checkpoints), refused_draws(model), libraries.without_cache(model) as uncached:
        tries = (
            [replace(only, grown=False)]
            if only is not None
            else list(attempts(parameters, args, kwargs, dynamic_shapes))
        )
        try:
            leaves = None if only is None else preserve
            exported = _first_success(model, tries, parameters, (args, kwargs), mode, preserve, leaves)
        except CaptureError as error:
            _blame_asked(model, parameters, (args, kwargs), mode, asked, error)
            raise
    captured = exported.captured
    if uncached and only is None:  # the first capture says it for all
        captured.notes.extend(cache_notes(model, args, kwargs, mode))
    if seen_checkpoints:
        captured.notes.append(CHECKPOINT_NOTE)
    _check_asked(captured, asked)
    return exported


def _blame_asked(
    model: nn.Module,
    parameters: inspect.Signature,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    mode: Mode,
    asked: Sequence[tuple[str, int, Any]],
    error: CaptureError,
) -> None:
    """Where the model captures once its sizes are left to torch, a dimension that was asked for is to blame."""
    if not asked:
        return
    try:
        free = _first_success(model, list(attempts(parameters, *example, None)), parameters, example, mode, ())
    except CaptureError:
        return
    try:
        _check_asked(free.captured, asked)
    except DynamicDimSpecialized as blame:
        raise blame from error


def _export(model: nn.Module, attempt: Attempt, preserve: Sequence[str]) -> torch.export.ExportedProgram:
    with quiet_failure():
        return torch.export.export(
            model,
            attempt.args,
            attempt.kwargs,
            dynamic_shapes=attempt.dynamic_shapes or None,
            strict=False,
            preserve_module_call_signature=tuple(preserve),
        )


def _first_success(
    model: nn.Module,
    tries: Sequence[Attempt],
    parameters: inspect.Signature,
    example: tuple[tuple[Any, ...], dict[str, Any]],
    mode: Mode,
    preserve: Sequence[str],
    leaves: Sequence[str] | None = None,
) -> Exported:
    first: Exception | None = None
    handled = sys.exception()
    one_is_apart = False
    for asked in (*tries, *second_route(tries)):
        try:
            program, attempt, untraced = export_around(model, asked, lambda a: _export(model, a, preserve), leaves)
        except Exception as error:
            forget(handled, error)
            first = first or error
            # What stays eager is run to see its sizes, and a model need not run where a size of 1 was grown.
            if is_unknown_output(error) or (is_data_dependent(error) and not asked.grown):
                break
            continue
        exported = _assemble(program, model, attempt, parameters, mode)
        if untraced is not None:
            exported.captured.untraced = capture_failure(untraced, model, "export")
            exported.captured.notes.append(_EAGER_NOTE.format(", ".join(f"`{path}`" for path in attempt.eager)))
        if not _accepts(exported.captured.signature, *example):
            continue  # growing a size of 1 shut the user's own example out
        if (
            attempt.grown
            and mode == "eval"
            and not attempt.eager
            and not computes_the_same(model, exported.captured, *example)
        ):
            one_is_apart = True
            continue
        if one_is_apart:
            exported.captured.notes.append(ONE_NOTE)
        return exported
    if first is None:
        raise CaptureError("the export route fits none of the examples to their own guards; pass larger examples")
    if has_numbers(model) and not (is_data_dependent(first) or is_unknown_output(first)):
        example_run(model, *example)  # where it fails, its own error tells more: sizes are numbers there
    raise capture_failure(first, model, "export") from first


def _accepts(signature: CallSignature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        signature.inputs(signature.bind(args, kwargs))
    except GuardError:
        return False
    return True


def _assemble(
    program: torch.export.ExportedProgram, model: nn.Module, attempt: Attempt, parameters: inspect.Signature, mode: Mode
) -> Exported:
    unlifted = unlift(program, model)
    templates, tensors = input_templates(parameters, attempt.args, attempt.kwargs)
    if len(tensors) != len(unlifted.inputs):
        raise CaptureError(
            f"the export route has {len(unlifted.inputs)} tensor inputs, the call has {len(tensors)}:"
            " a tensor default of forward, or a container torch flattens differently. Pass every tensor explicitly."
        )
    labels = slot_labels(templates, len(tensors))
    signature = CallSignature(
        parameters=parameters,
        templates=tuple(_with_library_defaults(template) for template in templates),
        n_inputs=len(tensors),
        out_spec=program.call_spec.out_spec,
        guards=replace(input_guards(unlifted.inputs, labels, program), dtypes=parameter_dtypes(model)),
        hints=libraries.HINTS,
    )
    module = unlifted.module
    module.graph.set_codegen(CallCodeGen(signature))
    module.recompile()
    captured = Captured(
        module, signature, mode, "export", notes=unlifted.notes, attempt=attempt, functional=unlifted.functional
    )
    for node, label in zip(unlifted.inputs, labels, strict=True):
        for axis, size in enumerate(node.meta["val"].shape):
            (captured.open_dims if fixed_size(size) is None else captured.fixed_dims).append((label, axis))
    return Exported(program, unlifted, captured)


def _with_library_defaults(template: Template) -> Template:
    """Constants that a library reads as "the default" accept the values that mean the same."""
    if isinstance(template, Items) and template.keys is not None:
        children = tuple(_with_library_defaults(child) for child in template.children)
        return Items(children, template.label, template.keys)
    if isinstance(template, Constant):
        same = libraries.SAME_AS_DEFAULT.get(template.label, ())
        if template.value in same:
            return Constant(template.value, template.label, same)
    return template


def _check_asked(captured: Captured, asked: Sequence[tuple[str, int, Any]]) -> None:
    fixed = set(captured.fixed_dims)
    for label, axis, wish in asked:
        if (label, axis) in fixed:
            raise DynamicDimSpecialized(
                f"argument `{label}`, axis {axis}: asked to be dynamic ({wish}), but the model fixes its size."
                " Leave it out of dynamic_shapes, use Dim.AUTO, or remove the code that depends on the exact size."
            )
