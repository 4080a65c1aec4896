"""`rewrite`: capture a model, find its streams, rewrite them into a form, on the user's own submodules."""

from __future__ import annotations

import copy as copying
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from resfx.capture import capture, check_module
from resfx.captured import Captured
from resfx.find import capture_notes
from resfx.folded_capture import capture_folded
from resfx.passes import Applied, Form, FormError, Plan, Refusal, apply_all
from resfx.patterns import NoResidualFound, ResfxError, ResidualMap, Searched, Stream, open_modules, refresh, search
from resfx.rewritten import Origin, Rewritten
from resfx.selection import Select, Streams, chosen_streams, predicate, require_match
from resfx.verify import verify_capture


class RewriteError(ResfxError):
    """The model was captured and searched, and can't be rewritten as asked."""


@dataclass(frozen=True)
class _Call:
    """The example call and how to capture it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    frontend: str


def rewrite(
    model: nn.Module,
    form: Form,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    frontend: str = "export",
    copy: bool = True,
    select: Select = None,
    streams: Streams = None,
    warm_start: bool = False,
) -> Rewritten:
    """Rewrite the residual connections of `model` into `form`.

    Args follow torch.export.export: one example call; every batch and sequence size that the model leaves open stays open.
    `copy=False` uses the model's own submodules instead of deep copies. `streams` (indices of `find`'s map) and `select` (globs on module
    paths, or a predicate over sites) limit what is rewritten. `warm_start`: the result starts as the identical function.

    The result has the model's call signature and output types, its state_dict names plus `residual.*`, and `.residual_map`.
    Errors: NoResidualFound (with the near misses), RewriteError, SelectionError, FormError, CaptureError and its kin.
    """
    _check(model, form)
    call = _Call(tuple(args), dict(kwargs or {}), dynamic_shapes, frontend)
    source = _copied(model) if copy else model
    earlier: tuple[Plan, ...] = ()
    if isinstance(source, Rewritten):
        earlier, plain = source.origin.plans, source.origin.model
    else:
        plain = source
    flat = capture(plain, call.args, call.kwargs, dynamic_shapes=dynamic_shapes, frontend=frontend)
    found = search(flat.graph_module)
    if not found.streams:
        raise NoResidualFound(_nothing_found(found), found.rejected)
    taken = [plan.stream.index for plan in earlier]
    wanted = chosen_streams(found.streams, streams, taken)
    require_match([found.streams[i] for i in wanted], select)
    named = streams is not None or select is not None
    new = [Plan(found.streams[i], form, predicate(select), warm_start) for i in wanted]
    result = _apply(plain, call, flat, found, [*earlier, *new], set(wanted) if named else set())
    if isinstance(source, Rewritten):
        _carry_over(source, result)
    return result


def _check(model: nn.Module, form: Form) -> None:
    check_module(model)
    if not isinstance(form, Form):
        hint = " (call the class: it takes its options)" if isinstance(form, type) and issubclass(form, Form) else ""
        raise FormError(f"expected a residual form such as resfx.DeltaAttention(), got {form!r}{hint}")
    if not isinstance(model, Rewritten) and hasattr(model, "residual"):
        raise RewriteError(
            f"{type(model).__name__} already has an attribute `residual`, where the new parameters go; rename it before the rewrite"
        )


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copying.deepcopy(model)
    except Exception as error:
        raise RewriteError(
            f"{_uncopyable(model)} can't be deep-copied ({error}); pass copy=False to rewrite on the model's own submodules"
        ) from error


def _uncopyable(model: nn.Module) -> str:
    """The innermost submodule whose copy fails, by path."""
    for path, module in reversed(list(model.named_modules())):
        try:
            copying.deepcopy(module)
        except Exception:
            return f"module `{path}` ({type(module).__name__})" if path else f"the model ({type(module).__name__})"
    return "the model"


def _nothing_found(found: Searched) -> str:
    if not found.rejected:
        return "no residual connection found: the graph has no sum of two computed terms"
    nearest = found.rejected[:3]
    lines = "; ".join(f"{r.source or r.node.name}: {r.reason}" for r in nearest)
    return f"no residual connection found; {len(found.rejected)} sums came near: {lines}"


def _apply(
    plain: nn.Module, call: _Call, flat: Captured, found: Searched, plans: list[Plan], named: set[int]
) -> Rewritten:
    """Capture again with all other modules as leaves, fold, verify, and run the passes."""
    targets = [plan.stream.index for plan in plans]
    opened = open_modules([found.streams[i] for i in targets], flat.graph)
    seen: list[Searched] = []
    folded = capture_folded(plain, call.args, call.kwargs, flat, opened, lambda c: seen.append(search(c.graph_module)))
    streams = _matched(found.streams, seen[-1].streams)
    verify_capture(plain, folded.captured, call.args, call.kwargs)
    module = folded.captured.graph_module
    streams = refresh(streams, folded.mapping, module.graph)
    fresh = [replace(plan, stream=streams[plan.stream.index]) for plan in plans]
    outcomes = apply_all(module, fresh)
    notes = list(dict.fromkeys([*capture_notes(flat), *folded.captured.notes]))
    report = _report(streams, found, outcomes, named, notes, module)
    applied = tuple(plan for plan, outcome in zip(fresh, outcomes, strict=True) if isinstance(outcome, Applied))
    result = Rewritten(module, Origin(plain, applied), report)
    return _with_flags(result, plain)


def _with_flags(result: Rewritten, plain: nn.Module) -> Rewritten:
    """Every module keeps the training flag it had; the root too, where the model has a train mode."""
    flags = {path: module.training for path, module in plain.named_modules()}
    for path, module in result.named_modules():
        module.training = flags.get(path, plain.training)
    if plain.training and not result.trains:
        result.eval()
    return result


def _matched(first: list[Stream], second: list[Stream]) -> list[Stream]:
    """The second capture's streams. Errors: RewriteError where they are not those of the first one."""

    def sketch(streams: list[Stream]) -> list[list[tuple[str, str]]]:
        return [[(site.path, site.source) for site in stream.sites] for stream in streams]

    if sketch(first) == sketch(second):
        return second
    pairs = zip(sketch(first), sketch(second), strict=False)
    where = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    raise RewriteError(
        f"the residual connections differ between eval and train mode, first in stream {where}; "
        "call model.eval() and rewrite with a model whose layers do not depend on the mode"
    )


def _report(
    streams: list[Stream], found: Searched, outcomes: list[Applied | Refusal], named: set[int], notes: list[str], module: nn.Module
) -> ResidualMap:
    refused = {o.stream: o.reason for o in outcomes if isinstance(o, Refusal)}
    applied = [o for o in outcomes if isinstance(o, Applied)]
    for index, reason in refused.items():
        if index in named or not applied:
            raise RewriteError(f"stream {index} ({_first_site(streams[index])}) can't take the form: {reason}")
    if refused:
        listed = "; ".join(f"stream {i} ({_first_site(streams[i])}): {reason}" for i, reason in refused.items())
        warnings.warn(f"left plain: {listed}", stacklevel=4)
    changes: dict[str, int] = {}
    for outcome in applied:
        for kind, count in outcome.counts.items():
            changes[kind] = changes.get(kind, 0) + count
    parameters = {name: tuple(module.get_parameter(name).shape) for o in applied for name in o.parameters}
    forms = {o.stream: o.form for o in applied}
    return ResidualMap(streams, found.rejected, notes, refused, forms, parameters, changes)


def _first_site(stream: Stream) -> str:
    site = stream.sites[0]
    return f"{site.path or 'root'}, {site.source or site.node.name}"


def _carry_over(earlier: Rewritten, result: Rewritten) -> None:
    """The parameters that an earlier rewrite added keep their values (the same Parameter objects)."""
    for name, parameter in earlier.named_parameters():
        if not name.startswith("residual."):
            continue
        owner, _, leaf = name.rpartition(".")
        result.get_submodule(owner)._parameters[leaf] = parameter

