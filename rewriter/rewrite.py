"""`rewrite`: capture a model, find its streams, rewrite them into a form, on the user's own submodules."""

from __future__ import annotations

import copy as copying
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from resfx.applying import RewriteError, Untouched, apply_plans, carry_over
from resfx.capture import capture, check_module, example_call
from resfx.capture_errors import CaptureError
from resfx.captured import Captured, capture_notes
from resfx.folded_capture import capture_folded
from resfx.graphed import TRAIN_REFUSAL, GraphedModule
from resfx.parts import parts_of
from resfx.passes import Form, FormError, Plan
from resfx.patterns import NoResidualFound, Rejected, Searched, Stream, open_modules, refresh, search
from resfx.patterns.report import counted
from resfx.provenance import already, rewritten_forms
from resfx.rewrite_parts import Wish, rewrite_parts
from resfx.rewritten import Rewritten, is_attached, taken_names
from resfx.selection import Select, Streams, chosen_streams, matching, predicate
from resfx.tidy import drop_whole_slices
from resfx.verify import verify_capture

PlansFor = Callable[[Sequence[Stream]], Sequence[Plan]]


@dataclass(frozen=True)
class Call:
    """The example call and how to capture it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any = None
    frontend: str = "export"


@torch.inference_mode(False)  # what is copied and added has gradients, wherever it was made
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
    A model whose own forward can't be traced comes back as what it is, an instance of its class, with the submodules rewritten
    that trace and hold a stream: `residual_map.notes` names them. One that can be captured in eval mode only gives a result in eval
    mode, with a warning where it was in train mode.
    Errors: NoResidualFound (with the near misses), RewriteError, SelectionError, FormError, CaptureError and its kin.
    """
    _check(model, form)
    call = Call(*example_call(args, kwargs), dynamic_shapes, frontend)
    source = copied(model) if copy else model
    earlier = source.origin.plans if isinstance(source, Rewritten) else ()
    plain = source.origin.model if isinstance(source, Rewritten) else source

    def plans(found: Sequence[Stream]) -> list[Plan]:
        taken = [plan.stream.index for plan in earlier]
        return [*earlier, *stream_plans(found, form, select, streams, warm_start, taken)]

    insist = streams is not None or select is not None
    try:
        result = rewrite_by(plain, call, plans, insist=insist)
    except CaptureError as error:
        whole = isinstance(source, Rewritten) or dynamic_shapes is not None or frontend != "export"
        parts = [] if whole else parts_of(source, call.args, call.kwargs)
        if not parts:
            raise
        wish = Wish(form, select, streams, warm_start)
        try:
            result = rewrite_parts(source, (call.args, call.kwargs), parts, wish, _rewrite_part, error)
        except CaptureError:
            raise error from error.__cause__  # what stopped the whole stops a part too
    _warn_of_mode(model, result)
    if isinstance(source, Rewritten):
        carry_over(source, result)
    return result


def _warn_of_mode(model: nn.Module, result: nn.Module) -> None:
    """Who hands in a model in train mode must not go on in eval mode unseen."""
    if model.training and not all(part.trains for part in result.modules() if isinstance(part, GraphedModule)):
        warnings.warn(
            "the model is in train mode, the result in eval mode: train mode was not captured, `residual_map.notes` tells why",
            stacklevel=4,
        )


def stream_plans(
    found: Sequence[Stream],
    form: Form,
    select: Select,
    streams: Streams,
    warm_start: bool,
    taken: Sequence[int] = (),
) -> list[Plan]:
    """One plan for each stream that `select` and `streams` choose; `taken` are rewritten. Errors: SelectionError, NoResidualFound."""
    wanted = chosen_streams(found, streams, taken)
    wanted = matching(found, wanted, select, explicit=streams is not None)
    return [Plan(found[i], form, predicate(select), warm_start) for i in wanted]


def rewrite_by(plain: nn.Module, call: Call, plans_for: PlansFor, *, insist: bool) -> Rewritten:
    """Rewrite `plain` on its own submodules by the plans that `plans_for` makes of the streams found.

    `insist`: a stream that can't take its form is an error, not left plain. Errors: as `rewrite`.
    """
    flat = capture(plain, call.args, call.kwargs, dynamic_shapes=call.dynamic_shapes, frontend=call.frontend)
    found = search(flat.graph_module)
    if flat.untraced is not None and not found.streams:
        raise flat.untraced
    if not found.streams:
        raise NoResidualFound(nothing_found(found), found.rejected)
    return _apply(plain, call, flat, found, plans_for(found.streams), insist)


def _rewrite_part(part: nn.Module, args: Any, kwargs: Any, plans: PlansFor, insist: bool) -> Rewritten:
    return rewrite_by(part, Call(args, kwargs), plans, insist=insist)


def check_form(form: Any) -> None:
    """Errors: FormError for anything that is no form, a form's class included."""
    if isinstance(form, Form):
        return
    got = repr(form) if isinstance(form, str | type) else f"a {type(form).__name__}"
    hint = ""
    if isinstance(form, type) and issubclass(form, Form):
        hint = " (call the class: it takes its options)"
    elif isinstance(form, str):
        hint = " (a form as text is for the command line)"
    elif isinstance(form, tuple | dict | torch.Tensor):
        hint = " (the form comes before the example call)"
    raise FormError(f"expected a residual form such as resfx.DeltaAttention(), got {got}{hint}")


def _check(model: nn.Module, form: Form) -> None:
    check_module(model)
    check_form(form)
    scripted = [path for path, module in model.named_modules() if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise RewriteError(
            f"module `{scripted[0]}` is a TorchScript module, whose parameters no graph can hold; put the nn.Module that it was"
            " made from in its place"
        )
    earlier = rewritten_forms(model.graph) if isinstance(model, fx.GraphModule) else {}
    if earlier:
        raise RewriteError(
            f"this program was {already(earlier)}; rewrite the model it was made from, or use what resfx.save wrote of the first rewrite"
        )
    if "residual_map" in vars(model):
        raise RewriteError(f"this {type(model).__name__} was rewritten part by part already; rewrite the original")
    if is_attached(model):
        raise RewriteError(f"the {type(model).__name__} is attached (resfx.attach): resfx.detach it before the rewrite")
    if not isinstance(model, Rewritten) and hasattr(model, "residual"):
        raise RewriteError(
            f"{type(model).__name__} already has an attribute `residual`, where the new parameters go; rename it before the rewrite"
        )
    taken = [] if isinstance(model, Rewritten) else taken_names(model)
    if taken:
        raise RewriteError(
            f"{type(model).__name__} has an attribute `{taken[0]}`, which a rewritten model has itself; rename it before the rewrite"
        )


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. Errors: RewriteError naming the submodule that can't be copied."""
    try:
        result = copying.deepcopy(model, _nodes(model))
    except Exception as error:
        raise RewriteError(
            f"{_uncopyable(model)} can't be deep-copied ({error}); pass copy=False to rewrite on the model's own submodules"
        ) from error
    originals = set(map(id, model.modules()))
    for path, module in result.named_modules():
        if _reaches(vars(module).get("forward"), originals):
            raise RewriteError(
                f"the forward set on module `{path or type(module).__name__}` holds the original's submodules, which its copy"
                " would still run; pass copy=False, or define forward in the class"
            )
    return result


def _nodes(model: nn.Module) -> dict[int, Any]:
    """The nodes of the graphs that its modules hold, which a copy may share: unflattened programs keep nodes as attributes.

    The copy of a graph has nodes of its own all the same.
    """
    graphs = [graph for module in model.modules() if isinstance(graph := getattr(module, "graph", None), fx.Graph)]
    return {id(node): node for graph in graphs for node in graph.nodes}


def _reaches(value: Any, modules: set[int]) -> bool:
    """Is `value` one of `modules`, a method of one, or a function with one in its variables?"""
    seen: set[int] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if id(value) in modules:
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        if inspect.ismethod(value):
            pending += [value.__self__, value.__func__]
        elif inspect.isfunction(value):
            variables = inspect.getclosurevars(value)
            pending += [
                *variables.nonlocals.values(),
                *(value.__defaults__ or ()),
                *(value.__kwdefaults__ or {}).values(),
            ]
            pending += [v for v in variables.globals.values() if isinstance(v, nn.Module)]
    return False


def _uncopyable(model: nn.Module) -> str:
    """The innermost submodule whose copy fails, by path."""
    for path, module in reversed(list(model.named_modules())):
        try:
            copying.deepcopy(module, _nodes(module))
        except Exception:
            return f"module `{path}` ({type(module).__name__})" if path else f"the model ({type(module).__name__})"
    return "the model"


def nothing_found(found: Searched) -> str:
    """That there is no residual connection, and which sums came near."""
    if not found.rejected:
        return "no residual connection found: the graph has no sum of two computed terms"
    nearest = found.rejected[:3]
    lines = "; ".join(f"{_place(r)}: {r.reason}" for r in nearest)
    came = f"{counted(len(found.rejected), 'sum')} came near: {lines}"
    return f"no residual connection found; {came}. `explain(PATH)` of find's map tells of every sum in a module why it is none."


def _place(rejected: Rejected) -> str:
    at = rejected.source or rejected.node.name
    return f"module `{rejected.path}`, {at}" if rejected.path else at


def _apply(
    plain: nn.Module, call: Call, flat: Captured, found: Searched, plans: Sequence[Plan], insist: bool
) -> Rewritten:
    """Capture again with all other modules as leaves, fold, verify, and run the passes."""
    targets = [plan.stream.index for plan in plans]
    opened = open_modules([found.streams[i] for i in targets], flat.graph)
    seen: list[Searched] = []
    folded = capture_folded(plain, call.args, call.kwargs, flat, opened, lambda c: seen.append(search(c.graph_module)))
    streams = _matched(found.streams, seen[-1].streams)
    verify_capture(plain, folded.captured, call.args, call.kwargs)
    module = folded.captured.graph_module
    moved = drop_whole_slices(module.graph, folded.mapping)
    # The nodes of the other streams may be inside leaves now.
    fresh = {stream.index: stream for stream in refresh([streams[i] for i in targets], moved, module.graph)}
    streams = [fresh.get(stream.index, stream) for stream in streams]
    notes = tuple(dict.fromkeys([*capture_notes(flat), *folded.captured.notes]))
    refusal = module.meta.get(TRAIN_REFUSAL)
    untouched = Untouched(module.graph, frozenset(targets), tuple(streams), tuple(found.rejected), notes, refusal)
    return apply_plans(plain, module, untouched, plans, set(targets) if insist else set())


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
