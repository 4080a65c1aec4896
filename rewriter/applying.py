"""From a captured model and plans to the `Rewritten` module; again from the same capture where some are taken back."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx, nn

from resfx.graphed import TRAIN_REFUSAL
from resfx.passes import Applied, Plan, Refusal, apply_all
from resfx.patterns import ResfxError, ResidualMap, Stream, refresh
from resfx.patterns.alive import living, reaching_output
from resfx.patterns.rejected import Rejected
from resfx.patterns.streams import Event, Transition, Write
from resfx.rewritten import Origin, Rewritten
from resfx.root import graft


class RewriteError(ResfxError):
    """The model was captured and searched, and can't be rewritten as asked."""


@dataclass(frozen=True)
class Untouched:
    """A folded capture that no pass has touched: its graph, and what was found in it, as nodes of `graph`.

    Streams that no plan opened may lie inside leaves, in part or whole: their nodes are those of an earlier graph.
    """

    graph: fx.Graph
    opened: frozenset[int]
    streams: tuple[Stream, ...]
    rejected: tuple[Rejected, ...]
    notes: tuple[str, ...]
    train_refusal: str | None

    def copied(self) -> Untouched:
        """The same on a graph of its own: passes edit graphs, streams and sites in place."""
        graph = copy.deepcopy(self.graph)
        moved = dict(zip(self.graph.nodes, graph.nodes, strict=True))
        opened = [_with_own_sites(stream) for stream in self.streams if stream.index in self.opened]
        fresh = {stream.index: stream for stream in refresh(opened, moved, graph)}
        return replace(self, graph=graph, streams=tuple(fresh.get(stream.index, stream) for stream in self.streams))


def apply_plans(
    plain: nn.Module, module: fx.GraphModule, untouched: Untouched, plans: Sequence[Plan], named: set[int]
) -> Rewritten:
    """Run the passes on `module`, which holds `untouched.graph`, and report.

    Errors: RewriteError where a stream of `named`, or every stream, can't take its form.
    """
    kept = untouched.copied()
    live = reaching_output(untouched.graph)
    fresh = [replace(plan, stream=living(untouched.streams[plan.stream.index], live)) for plan in plans]
    outcomes = apply_all(module, fresh, streams=untouched.streams)
    report = residual_report(untouched, outcomes, named, module)
    applied = tuple(plan for plan, outcome in zip(fresh, outcomes, strict=True) if isinstance(outcome, Applied))
    return _with_flags(Rewritten(module, Origin(plain, applied, kept), report), plain)


def reapply(rewritten: Rewritten, plans: Sequence[Plan]) -> Rewritten:
    """The model that `rewritten` came from, rewritten by `plans` alone; parameters that both have keep their values."""
    origin = rewritten.origin
    untouched = origin.untouched.copied()
    module = graft(rewritten, untouched.graph)
    module._modules.pop("residual", None)
    if untouched.train_refusal is not None:
        module.meta[TRAIN_REFUSAL] = untouched.train_refusal
    result = apply_plans(origin.model, module, untouched, plans, {plan.stream.index for plan in plans})
    carry_over(rewritten, result)
    return result


def carry_over(earlier: Rewritten, result: Rewritten) -> None:
    """The parameters that an earlier rewrite added stay the same Parameter objects in `result`, where it has them."""
    own = dict(result.named_parameters(remove_duplicate=False))
    for name, parameter in earlier.named_parameters(remove_duplicate=False):
        if name.startswith("residual.") and name in own:
            owner, _, leaf = name.rpartition(".")
            result.get_submodule(owner)._parameters[leaf] = parameter


def describe(stream: Stream) -> str:
    """A stream by its first site, for messages."""
    site = stream.sites[0]
    return f"{site.path or 'root'}, {site.source or site.node.name}"


def _with_own_sites(stream: Stream) -> Stream:
    return replace(stream, events=tuple(_with_own_site(event) for event in stream.events), notes=list(stream.notes))


def _with_own_site(event: Event) -> Event:
    if isinstance(event, Write):
        return replace(event, site=copy.copy(event.site))
    if isinstance(event, Transition):
        return replace(event, sites=tuple(copy.copy(site) for site in event.sites))
    return event


def _with_flags(result: Rewritten, plain: nn.Module) -> Rewritten:
    """Every module keeps the training flag it had; the root too, where the model has a train mode."""
    flags = {path: module.training for path, module in plain.named_modules()}
    for path, module in result.named_modules():
        module.training = flags.get(path, plain.training)
    if plain.training and not result.trains:
        result.eval()
    return result


def residual_report(
    untouched: Untouched, outcomes: Sequence[Applied | Refusal], named: set[int], module: nn.Module
) -> ResidualMap:
    """What the passes did to `module`. Errors: RewriteError where a stream of `named`, or every stream, was refused."""
    streams = list(untouched.streams)
    refused = {o.stream: o.reason for o in outcomes if isinstance(o, Refusal)}
    applied = [o for o in outcomes if isinstance(o, Applied)]
    for index, reason in refused.items():
        if index in named or not applied:
            raise RewriteError(f"stream {index} ({describe(streams[index])}) can't take the form: {reason}")
    if refused:
        listed = "; ".join(f"stream {i} ({describe(streams[i])}): {reason}" for i, reason in refused.items())
        warnings.warn(f"left plain: {listed}", stacklevel=5)
    changes: dict[str, int] = {}
    for outcome in applied:
        for kind, count in outcome.counts.items():
            changes[kind] = changes.get(kind, 0) + count
    parameters = {name: tuple(module.get_parameter(name).shape) for o in applied for name in o.parameters}
    forms, chosen = {o.stream: o.form for o in applied}, {o.stream: o.sites for o in applied}
    paths = tuple(path for path, _ in module.named_modules(remove_duplicate=False))
    return ResidualMap(
        streams, list(untouched.rejected), list(untouched.notes), refused, forms, chosen, parameters, changes, paths
    )
