"""Which part of a stream an output depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import takewhile
from operator import attrgetter

from torch.fx import Graph, Node

from resfx.patterns.event_nodes import taken_out
from resfx.patterns.streams import Reader, Stream, Write

_UNREAD = "no output depends on it"


def ancestors(
    ends: Iterable[Node], inputs: Callable[[Node], Iterable[Node]] = attrgetter("all_input_nodes")
) -> set[Node]:
    """`ends`, and all that they are computed from, as `inputs` tells for each."""
    found: set[Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(inputs(node))
    return found


def reaching_output(graph: Graph) -> set[Node]:
    """The nodes that an output is computed from."""
    return ancestors(node for node in graph.nodes if node.op == "output")


def living(stream: Stream, live: set[Node]) -> Stream:
    """The stream up to its last state in `live`; the sites after it are marked as refused.

    A dropout behind the last update keeps what nobody reads in the graph, since it draws random numbers. Such readers are content
    with any value of the state's shape.
    """
    events = tuple(takewhile(lambda event: event.after in live, stream.events))
    kept = {event.site for event in events if isinstance(event, Write)}
    for site in stream.sites:
        if site not in kept:
            site.refused = site.refused or _UNREAD
    if not kept:
        return replace(stream, refused=stream.refused or _UNREAD)
    states = {stream.entry, *(event.after for event in events)}
    read = states.union(part for event in events for part in taken_out(event))
    numbers = {site.index for site in kept}
    listed = [reader for reader in stream.readers if reader.state in read and reader.user in live]
    readers = [r if r.site is None or r.site in numbers else replace(r, role="tap", site=None) for r in listed]
    idle = [(user, state) for state in states for user in state.users if user not in live]
    return replace(stream, events=events, readers=(*readers, *(Reader(user, state, "shape") for user, state in idle)))
