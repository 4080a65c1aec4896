"""What `attach` decides once, from one capture of the example call: streams, sites and parameters, as data.

Every graph that Dynamo captures later is held against it: the streams found there must be these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from resfx.applying import Untouched, residual_report
from resfx.capture import capture
from resfx.captured import capture_notes
from resfx.passes import Applied, Form, FormError, apply_all
from resfx.passes.parameters import ParameterTree
from resfx.patterns import NoResidualFound, ResfxError, ResidualMap, Stream, search
from resfx.patterns.alive import living, reaching_output
from resfx.patterns.dialect import module_stack
from resfx.rewrite import nothing_found, stream_plans
from resfx.selection import Select, Streams
from resfx.tidy import drop_whole_slices


class LiveError(ResfxError):
    """The live mode can't rewrite this model, or this call of it."""


@dataclass(frozen=True)
class KnownSite:
    """A site by where its sum is written, and its place among the stream's branches.

    `path` is the module as the capture names it, `module` the first of its names, and `calls` the modules whose calls it is in.
    """

    path: str
    module: str
    calls: tuple[str, ...]
    source: str
    branch_id: int
    repeats: int
    params: frozenset[str]  # the names of the Parameters its branches used at attach

    @property
    def place(self) -> tuple[str, str]:
        return self.module, self.source


@dataclass(frozen=True)
class KnownStream:
    """A stream that is rewritten: `chosen` are the indices of its selected sites, `axis` its feature axis.

    `rate`: what the learning rate of its branches is multiplied by.
    """

    index: int
    sites: tuple[KnownSite, ...]
    axis: int | None
    form: Form
    chosen: frozenset[int]
    warm: bool
    rate: float


@dataclass(frozen=True)
class Settled:
    """The streams to rewrite, the new parameters (None where the form has none), and the report."""

    streams: tuple[KnownStream, ...]
    parameters: ParameterTree | None
    residual_map: ResidualMap


def settle(
    model: nn.Module,
    form: Form,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    select: Select,
    streams: Streams,
    warm_start: bool,
) -> Settled:
    """Capture the example call, and rewrite the capture for the names, shapes and starts of the parameters.

    Errors: as `rewrite`; FormError for a form that repeats streams.
    """
    if form.loop_count is not None:
        raise FormError(
            f"{form.to_spec()} runs a stream several times, and with it whatever its branches do beside computing (a cache"
            " that they fill): use resfx.rewrite, or leave out loops= and let the model loop"
        )
    flat = capture(model, args, dict(kwargs))
    drop_whole_slices(flat.graph, {})  # before the search: nothing refers to its nodes yet
    found = search(flat.graph_module)
    if not found.streams:
        raise NoResidualFound(nothing_found(found), found.rejected)
    live = reaching_output(flat.graph)
    chosen = stream_plans(found.streams, form, select, streams, warm_start)
    plans = [replace(plan, stream=living(plan.stream, live)) for plan in chosen]
    names = first_names(model)
    before = {plan.stream.index: _sites(plan.stream, names) for plan in plans}
    untouched = Untouched(
        flat.graph, frozenset(), tuple(found.streams), tuple(found.rejected), tuple(capture_notes(flat)), None
    )
    outcomes = apply_all(flat.graph_module, plans, streams=found.streams)
    insist = streams is not None or select is not None
    told = residual_report(untouched, outcomes, set(before) if insist else set(), flat.graph_module)
    known = [
        KnownStream(
            index=o.stream,
            sites=before[o.stream],
            axis=found.streams[o.stream].axis,
            form=form,
            chosen=frozenset(o.sites),
            warm=warm_start,
            rate=1.0 if warm_start else form.learning_rate_factor(found.streams[o.stream]),
        )
        for o in outcomes
        if isinstance(o, Applied)
    ]
    tree = flat.graph_module._modules.get("residual")
    return Settled(tuple(known), tree if isinstance(tree, ParameterTree) else None, told)


def _sites(stream: Stream, names: Mapping[str, str]) -> tuple[KnownSite, ...]:
    return tuple(
        KnownSite(
            s.path, names.get(s.path, s.path), tuple(module_stack(s.node)), s.source, s.branch_id, s.repeats, s.params
        )
        for s in stream.sites
    )


def first_names(model: nn.Module) -> dict[str, str]:
    """Of every module path the first one that leads to the same module: layers may be registered under several names."""
    first: dict[int, str] = {}
    return {path: first.setdefault(id(module), path) for path, module in model.named_modules(remove_duplicate=False)}


def owner_path(sites: Sequence[KnownSite]) -> str:
    """The innermost module whose call ran all `sites`. One that holds them may never be called: its layers are, by others."""
    shared: list[str] = []
    for paths in zip(*(site.calls for site in sites), strict=False):
        if len(set(paths)) > 1:
            break
        shared.append(paths[0])
    return shared[-1] if shared else ""
