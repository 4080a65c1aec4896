"""Which modules must stay open when capture folds modules back into single calls.

A module is open where an event of a stream happens in its own code: the add, a scale, a cast or view of the state.
Every other module is a leaf: one call of the user's own submodule. A norm that is a transition stays a leaf if its
module does nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from torch.fx import Graph, Node

from resfx.patterns.dialect import module_stack
from resfx.patterns.event_nodes import event_nodes
from resfx.patterns.places import joined_into
from resfx.patterns.streams import Stream, Transition


def open_modules(streams: Iterable[Stream], graph: Graph) -> set[str]:
    """Module paths, the root `""` included, that hold the glue of some stream."""
    streams = list(streams)
    found = {""}
    for stream in streams:
        for event in stream.events:
            if not isinstance(event, Transition):
                joined = joined_into(event.before, event.after)
                own = event_nodes(event) | ({joined} if joined is not None else set())
                found.update(path for node in own for path in module_stack(node))
    inside = _nodes_by_module(graph)
    for stream in streams:
        for event in stream.events:
            if isinstance(event, Transition):
                _open_around(event, found, inside)
    return found


def _nodes_by_module(graph: Graph) -> dict[str, set[Node]]:
    """Path -> the nodes of one call; of all calls where a module is called more than once."""
    inside: dict[str, set[Node]] = defaultdict(set)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or not node.users:
            continue
        for path in module_stack(node):
            inside[path].add(node)
    return inside


def _open_around(event: Transition, found: set[str], inside: dict[str, set[Node]]) -> None:
    """Open every module around the transition that does more than the transition (in all of its calls)."""
    own = set(event.nodes)
    kinds = sorted(str(n.target) for n in own)
    for path in module_stack(event.after):
        if path in found:
            continue
        if _only_such_calls(inside[path], own, kinds):
            return
        found.add(path)


def _only_such_calls(nodes: set[Node], own: set[Node], kinds: list[str]) -> bool:
    """Is every call of the module one such transition? A module called n times holds n times its nodes."""
    if nodes <= own:
        return True
    return len(nodes) % len(own) == 0 and sorted(str(n.target) for n in nodes) == sorted(
        kinds * (len(nodes) // len(own))
    )
