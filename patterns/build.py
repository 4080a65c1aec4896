"""From what the search found to streams: the events in order, the readers of every state, the modules that must stay open.

`build` works on the graph that was searched. When capture then folds modules into single calls, `refresh` carries the streams
over to the folded graph and finds their readers there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch.fx import Graph, Node

from resfx.patterns import dialect
from resfx.patterns.axis import feature_axis
from resfx.patterns.dialect import data_inputs, op_name
from resfx.patterns.errors import SumDiffers
from resfx.patterns.event_nodes import event_nodes, taken_out
from resfx.patterns.search import Found
from resfx.patterns.slices import slice_base
from resfx.patterns.streams import Cast, Event, Layout, Reader, Scale, Side, Site, Stream, Term, Transition, Write
from resfx.patterns.sums import terms_of
from resfx.patterns.threads import Thread


def build(found: Found, graph: Graph) -> list[Stream]:
    """The streams of the searched graph, in the order of their first sites, readers included."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = len(order)
    threads = sorted(found.threads, key=lambda t: order.get(t.sites[0].node, last))
    streams = [_stream(i, thread, found, graph) for i, thread in enumerate(threads)]
    return refresh(streams, {}, graph)


def _stream(index: int, thread: Thread, found: Found, graph: Graph) -> Stream:
    if thread.sites[0].node.graph is not graph:  # found inside torch.cond and nowhere else
        site = thread.sites[0]
        events: tuple[Event, ...] = tuple(Write(s.skip, s.result, s) for s in thread.sites)
        return Stream(index, site.skip, events, (), None, site.shape, refused=site.refused)
    events = _events(thread, found)
    _number(events)
    entry = events[0].before
    stream = Stream(index, entry, events, (), None, dialect.shape_of(entry) or ())
    stream.refused = _refusal(stream)
    for site in stream.sites:
        site.refused = site.refused or stream.refused
    return stream


def _events(thread: Thread, found: Found) -> tuple[Event, ...]:
    events: list[Event] = []
    for site in thread.sites:
        start = whole_state(site)
        steps = list(found.chain.walk(start))[::-1]
        if not events:
            steps = _from_entry(steps, site, start, found)
        events.extend(_joined_norms(steps, found))
        events.append(Write(start, site.result, site))
    return (*events, *_joined_norms(_after_last(thread.sites[-1].result, found), found))


def _after_last(state: Node, found: Found) -> list[Event]:
    """Side adds and scales that follow the last site still belong to the stream; what else follows reads its end."""
    events: list[Event] = []
    kept = 0
    while len(state.users) == 1:
        event = found.chain.step(next(iter(state.users)))
        if event is None or event.before is not state or isinstance(event, Transition):
            break
        events.append(event)
        kept = len(events) if isinstance(event, (Side, Scale)) else kept
        state = event.after
    return events[:kept]


def whole_state(site: Site) -> Node:
    """The state that the site updates: its skip operand, or the value that the operand is a slice of."""
    base = slice_base(site.region[0]) if site.region else site.skip
    return base if base is not None else site.skip


def _from_entry(steps: list[Event], site: Site, start: Node, found: Found) -> list[Event]:
    """The stream starts at the earliest state that the first branch reads, behind casts, views and scales of the skip."""
    region = branch_region(site, found.facts.order, {e.before for e in steps} | {start})
    first = len(steps)
    for position in range(len(steps) - 1, -1, -1):
        event = steps[position]
        if not isinstance(event, (Cast, Layout, Scale)):
            break
        if any(user in region and user is not event.after for user in event.before.users):
            first = position
    return steps[first:]


def _joined_norms(steps: list[Event], found: Found) -> list[Event]:
    """A gain and a bias that follow a norm belong to it: they are no scaled identity and no side add."""
    joined: list[Event] = []
    for event in steps:
        norm = next((i for i in range(len(joined) - 1, -1, -1) if not isinstance(joined[i], Cast)), None)
        if norm is None or not _is_affine(event, found) or not isinstance(joined[norm], Transition):
            joined.append(event)
            continue
        head = joined[norm]
        assert isinstance(head, Transition)
        casts = tuple(e.after for e in joined[norm + 1 :])
        del joined[norm:]
        joined.append(Transition(head.before, event.after, (*head.nodes, *casts, event.after)))
    return joined


def _is_affine(event: Event, found: Found) -> bool:
    static = found.facts.static
    if isinstance(event, Scale):
        return isinstance(event.factor, Node) and event.factor in static
    return isinstance(event, Side) and not event.region and all(o in static for t in event.terms for o in t.operands)


def _number(events: Iterable[Event]) -> None:
    """Execution order, transitions, and ties: sites whose branches use the same Parameters are one branch, run `repeats` times."""
    sites: list[Site] = []
    for event in events:
        if isinstance(event, Transition):
            sites.extend(event.sites)
            if sites:
                sites[-1].transition += tuple(n for n in map(op_name, event.nodes) if n != "getitem")
        elif isinstance(event, Write):
            sites.append(event.site)
    groups: dict[object, list[Site]] = {}
    for index, site in enumerate(sites):
        site.index = index
        groups.setdefault(site.params or index, []).append(site)
    for number, group in enumerate(groups.values()):
        for site in group:
            site.repeats, site.branch_id = len(group), number


def _refusal(stream: Stream) -> str | None:
    for site in stream.sites:
        if site.refused:
            return f"site {site.index} ({site.source or site.node.name}): {site.refused}"
    if any(site.kind == "coupling" for site in stream.sites):
        return "it is a reversible coupling, whose inverse a rewrite would break"
    for event in stream.events:
        if isinstance(event, Layout) and not dialect.as_many(event.before, event.after):
            return f"{event.after.name} changes how many numbers its state has (torch.vmap hides an axis, for one)"
    return None


def branch_region(site: Site, order: Mapping[Node, int], states: set[Node]) -> set[Node]:
    """The nodes that compute the update from the state before it: nothing that comes before that state in graph order."""
    floor = min(order[s] for s in states) if states else 0
    seen: set[Node] = set()
    todo = [o for t in site.terms for o in t.operands]
    while todo:
        node = todo.pop()
        if node in seen or node in states or order[node] < floor:
            continue
        seen.add(node)
        todo.extend(data_inputs(node))
    return seen


def refresh(streams: list[Stream], moved: Mapping[Node, Node], graph: Graph) -> list[Stream]:
    """The same streams on a graph in which the nodes of `moved` were replaced; readers are found anew."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    return [_refreshed(stream, moved, order) for stream in streams]


def _refreshed(stream: Stream, moved: Mapping[Node, Node], order: Mapping[Node, int]) -> Stream:
    if stream.entry not in order and moved.get(stream.entry) is None:
        return stream  # inside torch.cond: it is never rewritten
    events = tuple(e for old in _whole(stream.events, moved, order) if (e := _moved(old, moved, order)) is not None)
    entry = moved.get(stream.entry, stream.entry)
    fresh = Stream(stream.index, entry, events, (), stream.axis, stream.shape, stream.refused, stream.notes)
    fresh.readers = tuple(_readers(fresh, order))
    if fresh.axis is None:
        fresh.axis = feature_axis(fresh)
    return fresh


def _whole(events: Iterable[Event], moved: Mapping[Node, Node], order: Mapping[Node, int]) -> Iterable[Event]:
    """Events whose state in the middle is gone, as one: steps that differ between train and eval became one node."""
    whole: list[Event] = []
    for event in events:
        if whole and event.before not in moved and event.before not in order:
            event = _one_step(whole.pop(), event)
        whole.append(event)
    return whole


def _one_step(first: Event, second: Event) -> Event:
    match first, second:
        case Cast(), Cast():
            return Cast(first.before, second.after)
        case ((Cast() | Transition(sites=())), (Cast() | Transition(sites=()))):
            return Transition(first.before, second.after, ())
    raise SumDiffers(
        f"several steps on the state at `{dialect.module_path(second.after) or 'root'}`, {dialect.source_of(second.after)}, differ"
        " between train and eval mode and became one. Put one of them into a submodule."
    )


def _moved(event: Event, moved: Mapping[Node, Node], order: Mapping[Node, int]) -> Event | None:
    before, after = moved.get(event.before, event.before), moved.get(event.after, event.after)
    if before is after:
        return None  # a module that returns its input
    if isinstance(event, Write):
        return Write(before, after, _moved_site(event.site, moved, order))
    if isinstance(event, Side):
        region = tuple(moved.get(n, n) for n in event.region)
        return Side(before, after, tuple(_moved_term(t, moved) for t in event.terms), region)
    if isinstance(event, Scale) and isinstance(event.factor, Node):
        return replace(event, before=before, after=after, factor=moved.get(event.factor, event.factor))
    if isinstance(event, Transition) and not event.sites:
        return Transition(before, after, between(before, after, order))
    return replace(event, before=before, after=after)


def _moved_site(site: Site, moved: Mapping[Node, Node], order: Mapping[Node, int]) -> Site:
    site.skip = moved.get(site.skip, site.skip)
    site.region = tuple(moved.get(n, n) for n in site.region)
    site.node, site.result = moved.get(site.node, site.node), moved.get(site.result, site.result)
    site.terms = tuple(_moved_term(t, moved) for t in site.terms)
    site.branches = tuple(moved.get(b, b) for b in site.branches)
    if any(operand not in order for term in site.terms for operand in term.operands):
        site.terms = _terms_left(site, order)
        site.branches = tuple(operand for term in site.terms for operand in term.operands)
    return site


def _terms_left(site: Site, order: Mapping[Node, int]) -> tuple[Term, ...]:
    """The terms of the sum as it is now, where a part of it became one node (it differs between train and eval)."""
    found = terms_of(site.node) if site.node in order else None
    terms = tuple(t for t in found or () if t.operands != (site.skip,))
    if found is None or len(terms) != len(found) - 1:
        raise SumDiffers(
            f"the sum at `{site.path or 'root'}`, {site.source or site.node.name}, has other terms in train mode than in"
            " eval mode. Compute the update first, whatever depends on the mode included, and add it to the state at last."
        )
    return terms


def _moved_term(term: Term, moved: Mapping[Node, Node]) -> Term:
    scale = moved.get(term.scale, term.scale) if isinstance(term.scale, Node) else term.scale
    return Term(term.op, tuple(moved.get(o, o) for o in term.operands), scale)


def between(before: Node, after: Node, order: Mapping[Node, int]) -> tuple[Node, ...]:
    """The nodes from `before` (left out) to `after`, in order, without the parameters they use."""
    seen, todo = {after}, [after]
    while todo:
        for i in data_inputs(todo.pop()):
            if i is not before and i not in seen and order[i] > order[before] and i.op != "get_attr":
                seen.add(i)
                todo.append(i)
    return tuple(sorted(seen, key=order.__getitem__))


def _readers(stream: Stream, order: Mapping[Node, int]) -> Iterable[Reader]:
    """Everyone who reads a state, apart from the stream's own events."""
    own: set[Node] = set().union(*(event_nodes(event) for event in stream.events))
    segment = [stream.entry]
    for event in stream.events:
        if isinstance(event, Write):
            region = branch_region(event.site, order, set(segment))
            yield from _segment_readers([*segment, *taken_out(event)], own, region, event.site.index)
            segment = []
        segment.append(event.after)
    yield from _segment_readers(segment, own, set(), None)


def _segment_readers(states: list[Node], own: set[Node], region: set[Node], site: int | None) -> Iterable[Reader]:
    for state in states:
        for user in state.users:
            if user in own:
                continue
            if state not in data_inputs(user):
                yield Reader(user, state, "shape")
            elif user in region:
                yield Reader(user, state, "branch", site)
            else:
                yield Reader(user, state, "tap")
