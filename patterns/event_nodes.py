"""The nodes that events of a stream consist of, and what an update of a part of the state takes out of it."""

from __future__ import annotations

from torch.fx import Node

from resfx.patterns.dialect import data_inputs
from resfx.patterns.streams import Event, Side, Transition, Write


def sum_nodes(event: Write | Side) -> set[Node]:
    """The nodes that form the sum: the add, inner adds, a stack, and for a slice what takes the part out and puts it back."""
    if isinstance(event, Side):
        return _between_all([event.after], {o for t in event.terms for o in t.operands} | {event.before})
    site = event.site
    terms = {o for t in site.terms for o in t.operands}
    nodes = _between_all([site.node], terms | {site.skip})
    if not site.region:
        return nodes
    return nodes | _between_all([site.result, site.skip], {site.node, event.before})


def _between_all(tops: list[Node], stop: set[Node]) -> set[Node]:
    """What `tops` are computed from, down to the nodes of `stop`."""
    seen: set[Node] = set()
    todo = [n for n in tops if n not in stop]
    while todo:
        node = todo.pop()
        seen.add(node)
        todo.extend(
            i for i in data_inputs(node) if i not in stop and i not in seen and i.op not in ("placeholder", "get_attr")
        )
    return seen


def event_nodes(event: Event) -> set[Node]:
    """The nodes that are the event itself."""
    if isinstance(event, (Write, Side)):
        return sum_nodes(event)
    return set(event.nodes) if isinstance(event, Transition) else {event.after}


def taken_out(event: Event) -> list[Node]:
    """In order, the parts that an update of one of them takes out of the state before it, and their views. Others may read them too."""
    return _parts(event)[0]


def early_reader(event: Event) -> Node | None:
    """Who reads a part of the state after its update and before it is put back; None where nobody does."""
    own, updated = event_nodes(event), _parts(event)[1]
    return min((user for node in updated - {event.after} for user in node.users if user not in own), default=None)


def _parts(event: Event) -> tuple[list[Node], set[Node]]:
    """What an update of a part of the state takes out of it, in order, and the nodes of the updated part."""
    if not (isinstance(event, Write) and event.site.region) and not (isinstance(event, Side) and event.region):
        return [], set()
    terms = event.site.terms if isinstance(event, Write) else event.terms
    added = {operand for term in terms for operand in term.operands}
    parts: dict[Node, None] = {}
    updated: set[Node] = set()
    for node in sorted(event_nodes(event)):
        inputs = list(data_inputs(node))
        if any(i in updated or (i in added and i not in parts) for i in inputs):
            updated.add(node)
        elif any(i is event.before or i in parts for i in inputs):
            parts[node] = None
    return list(parts), updated
