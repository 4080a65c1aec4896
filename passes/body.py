"""The body of a stream: what computes the state at its end from the state at its entry, as a part that can be cut out.

The body holds every node that reads the entry, directly or through others, and that the end is computed from. All else it
reads (masks, conditioning, parameters) comes from outside and is the same in every repeat.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from resfx.passes.autocast import RegionWriter, regions_of
from resfx.passes.editor import functional_twin, value_of
from resfx.passes.layouts import same_shape
from resfx.passes.terms import event_path
from resfx.patterns.alive import ancestors
from resfx.patterns.dialect import CAST, LAYOUT, SHAPE_ONLY, op_name
from resfx.patterns.streams import Event, Stream, Write

# Changes a mode for all nodes after it, with no end of its own: it can be moved neither into a body nor out of it.
_MODE_CALL: Any = torch._C._set_grad_enabled


@dataclass(frozen=True)
class Body:
    """`nodes` in order, the last one is `end`; `dependent` are all nodes that read the entry, directly or not."""

    entry: Node
    end: Node
    nodes: tuple[Node, ...]
    dependent: frozenset[Node]

    @property
    def inputs(self) -> list[Node]:
        """What the body reads from outside, the entry left out."""
        inside = {self.entry, *self.nodes}
        return list(dict.fromkeys(i for node in self.nodes for i in node.all_input_nodes if i not in inside))

    @property
    def taps(self) -> list[Node]:
        """The nodes before the end that are read outside too."""
        inside = set(self.nodes)
        return [node for node in self.nodes[:-1] if any(user not in inside for user in node.users)]

    @property
    def late(self) -> list[Node]:
        """Nodes outside that stand before the end and read the body: they have to wait for it."""
        waiting = set(self.nodes)
        found = []
        for node in _from_to(self.nodes[0], self.end):
            if node not in waiting and any(source in waiting for source in node.all_input_nodes):
                waiting.add(node)
                found.append(node)
        return found


def body_of(entry: Node, end: Node) -> Body:
    """The body between two nodes of a graph."""
    dependent = _dependents(entry)
    needed = ancestors([end])
    nodes = tuple(node for node in entry.graph.nodes if node in dependent and node in needed)
    return Body(entry, end, nodes, dependent)


def _dependents(entry: Node) -> frozenset[Node]:
    """Every node that reads `entry`. Who asks for its sizes alone does not: they are the same in every repeat."""
    found = {entry}
    for node in entry.graph.nodes:
        sources = [source for source in node.all_input_nodes if source in found]
        if sources and not (sources == [entry] and op_name(node) in SHAPE_ONLY):
            found.add(node)
    return frozenset(found - {entry})


def _from_to(first: Node, last: Node) -> Iterable[Node]:
    node = first
    while node is not last:
        yield node
        node = node.next


def end_of(graph_module: GraphModule, stream: Stream) -> Node:
    """Where a repeat ends: the state after the last event, and what follows it as it follows the sites before.

    In a post-norm stream that is the last norm; a view or a cast that brings back the entry's shape and dtype belongs too.
    """
    end = stream.events[-1].after
    followed = _as_before(graph_module, stream)
    if followed is not None and end < followed:
        end = followed
    return _after_layout(stream.entry, end)


def _as_before(graph_module: GraphModule, stream: Stream) -> Node | None:
    """The end of what follows the last site, if it is what the rhythm of the sites before foretells."""
    after = _after_writes(stream.events)
    kinds = [[_kind(graph_module, node) for node in nodes] for nodes in after]
    period = next((p for p in range(1, len(after) + 1) if kinds[p:] == kinds[: len(kinds) - p]), 0)
    if period == 0 or not after[-period]:
        return None
    before = [event for event in stream.events if isinstance(event, Write)][-period - 1].after
    last = next(event for event in reversed(stream.events) if isinstance(event, Write))
    return _alike(graph_module, before, after[-period], last.after)


def _after_writes(events: Sequence[Event]) -> list[list[Node]]:
    """For every write but the last: the nodes that carry the state from it to the next one."""
    writes = [i for i, event in enumerate(events) if isinstance(event, Write)]
    return [
        [node for event in events[first + 1 : second] for node in event_path(event.before, event)]
        for first, second in pairwise(writes)
    ]


def _alike(graph_module: GraphModule, before: Node, nodes: Sequence[Node], state: Node) -> Node | None:
    """The last node of what is to `state` as `nodes` are to `before`."""
    twins = {before: state}
    for node in nodes:
        source = next(source for source in node.all_input_nodes if source in twins)
        users = [user for user in twins[source].users if user not in twins.values()]
        twin = next((user for user in users if _is_twin(graph_module, node, user, twins)), None)
        if twin is None:
            return None
        twins[node] = twin
    return twins[nodes[-1]]


def _is_twin(graph_module: GraphModule, node: Node, other: Node, twins: dict[Node, Node]) -> bool:
    if _kind(graph_module, node) != _kind(graph_module, other):
        return False
    pairs = zip(node.all_input_nodes, other.all_input_nodes, strict=False)
    same = all(twins[a] is b for a, b in pairs if a in twins)
    return same and len(node.all_input_nodes) == len(other.all_input_nodes)


def _kind(graph_module: GraphModule, node: Node) -> object:
    if node.op == "call_module":
        return type(graph_module.get_submodule(str(node.target)))
    return op_name(node)


def _after_layout(entry: Node, end: Node) -> Node:
    """Past views and casts, up to the first value of the entry's shape and dtype; `end` where none follows."""
    node = end
    while not like_entry(entry, node):
        readers = [user for user in node.users if op_name(user) not in SHAPE_ONLY]
        if len(readers) != 1 or op_name(readers[0]) not in CAST | LAYOUT:
            return end
        node = readers[0]
    return node


def like_entry(entry: Node, node: Node) -> bool:
    """Whether `node` has the shape and dtype of the entry."""
    a, b = value_of(entry), node.meta.get("val")
    return isinstance(b, torch.Tensor) and a.dtype == b.dtype and same_shape(a.shape, b.shape)


def reason_to_keep(body: Body, stream: Stream, others: Iterable[Stream]) -> str | None:
    """Why the body can't be cut out and repeated; None where it can."""
    if not like_entry(body.entry, body.end):
        return f"it starts as {_described(body.entry)} and ends as {_described(body.end)}; a repeat needs the same at both ends"
    for other in others:
        if other.index != stream.index and _runs_through(body, other):
            return f"stream {other.index} runs through it and is no part of one repeat: its state could not be carried round"
    for node in _from_to(body.nodes[0], body.end):
        if node.op == "call_function" and node.target is _MODE_CALL:
            return f"gradients are turned on or off in the middle of it ({node.name})"
    regions = regions_of(body.end.graph)
    around = regions[body.end]
    crossing = next((n for n in body.nodes if regions[n][: len(around)] != around), None)
    crossing = crossing or next((n for n in body.late if regions[n] != around), None)
    if crossing is not None:
        return f"an autocast region begins or ends in the middle of it ({crossing.name})"
    lost = next((node for node in body.late if not node.users and _writes_in_place(node)), None)
    if lost is not None:
        return f"{lost.name} writes a value of the model in the middle of it, once in every repeat"
    return None


def _described(node: Node) -> str:
    value = value_of(node)
    return f"{value.dtype} [{', '.join(str(size) for size in value.shape)}]".removeprefix("torch.")


def _runs_through(body: Body, other: Stream) -> bool:
    """Whether some of the other stream's states are computed inside, but not all of them."""
    inside = set(body.nodes)
    states = [other.entry, *(event.after for event in other.events)]
    if other.entry is body.entry:
        states = states[1:]
    return len({state in inside for state in states}) > 1


def _writes_in_place(node: Node) -> bool:
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return mutable or functional_twin(node) is not None


def graph_of(body: Body, modules: dict[str, Node]) -> tuple[Graph, dict[Node, Node]]:
    """The body as a graph of its own: inputs `loops`, the state, `inputs`, the modules it calls; outputs the end, the taps.

    Also returns the copy of every node. `modules` are the nodes outside that hold the called modules, by path.
    """
    graph = Graph()
    loops, state = graph.placeholder("loops"), graph.placeholder("state")
    loops.meta["val"] = 1
    copies = {body.entry: state}
    for outside in (*body.inputs, *modules.values()):
        copies[outside] = graph.placeholder(outside.name)
    for outside, inside in copies.items():
        inside.meta = {"val": outside.meta.get("val")}
    state.meta["custom"] = dict(body.entry.meta.get("custom", {}))  # its marks: it is the first site's state
    regions, writer = regions_of(body.end.graph), RegionWriter(graph)
    around = len(regions[body.end])  # the call of the body stands in these already
    for node in body.nodes:
        writer.switch(regions[node][around:])
        copies[node] = _copied(graph, node, copies, modules)
    graph.output(tuple(copies[node] for node in (body.end, *body.taps)))
    return graph, copies


def _copied(graph: Graph, node: Node, copies: dict[Node, Node], modules: dict[str, Node]) -> Node:
    if node.op != "call_module":
        return graph.node_copy(node, copies.__getitem__)
    copy = graph.node_copy(node, copies.__getitem__)
    copy.op, copy.target = "call_function", run_module
    copy.args = (copies[modules[str(node.target)]], *copy.args)
    return copy


def run_module(module: torch.nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """A call of a module that the graph has as a value."""
    return module(*args, **kwargs)
