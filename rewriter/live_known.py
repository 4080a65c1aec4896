"""What `attach` decides once, from one capture of the example call: streams, sites and parameters, as data.

Every graph that Dynamo captures later is held against it: the streams found there must be these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from resfx.applying import Untouched, residual_report
from resfx.capture import capture
from resfx.captured import capture_notes
from resfx.live_places import Census, Look, Place, first_names, looks_of, place
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
    `looks`: what its sums look like; `beside`: how many other sums stand on its place, for each site there.
    """

    path: str
    module: str
    calls: tuple[str, ...]
    source: str
    branch_id: int
    repeats: int
    params: frozenset[str]  # the first names of the Parameters its branches used at attach
    looks: frozenset[Look]
    beside: float = 0.0

    @property
    def place(self) -> Place:
        """Where a graph of Dynamo's has it."""
        return place(self.module, self.source)


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
    census = Census((node for node in flat.graph.nodes if node in live), (plan.stream for plan in plans), names)
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
    return Settled(_with_beside(known, census), tree if isinstance(tree, ParameterTree) else None, told)


def _sites(stream: Stream, names: Mapping[str, str]) -> tuple[KnownSite, ...]:
    return tuple(
        KnownSite(
            path=site.path,
            module=names.get(site.path, site.path),
            calls=tuple(module_stack(site.node)),
            source=site.source,
            branch_id=site.branch_id,
            repeats=site.repeats,
            params=frozenset(names.get(name, name) for name in site.params),
            looks=looks_of(site),
        )
        for site in stream.sites
    )


def _with_beside(known: Sequence[KnownStream], census: Census) -> tuple[KnownStream, ...]:
    others = census.beside(stream.index for stream in known)
    here = Counter(site.place for stream in known for site in stream.sites)

    def told(site: KnownSite) -> KnownSite:
        return replace(site, beside=others[site.place] / here[site.place])

    return tuple(replace(stream, sites=tuple(map(told, stream.sites))) for stream in known)


def owner_path(sites: Sequence[KnownSite]) -> str:
    """The innermost module whose call ran all `sites`. One that holds them may never be called: its layers are, by others."""
    shared: list[str] = []
    for paths in zip(*(site.calls for site in sites), strict=False):
        if len(set(paths)) > 1:
            break
        shared.append(paths[0])
    return shared[-1] if shared else ""
