"""The only thing that changes a graph: emits calls, copies stretches of a stream, replaces inputs, erases what died.

Every node it makes carries `val` (computed by running the call on its inputs' fake values), the stack trace and module
stack of the node it stands for, and its provenance under `meta["custom"]["resfx"]`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from resfx.passes.errors import EditError
from resfx.passes.marks import NOTE, Mark, put, without_marks

_OPERATOR_TWINS: dict[str, Callable[[Any, Any], Any]] = {
    "iadd": operator.add,
    "isub": operator.sub,
    "imul": operator.mul,
    "itruediv": operator.truediv,
}
_CARRIED_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn")


@dataclass(frozen=True)
class Replacement:
    """`user` reads `new` where it read `old`."""

    user: Node
    old: Node
    new: Node


class Editor:
    """Edits one graph module. Its code is stale until the caller recompiles it."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self.graph = graph_module.graph
        self.emitted: dict[Node, None] = {}
        self.replacements: list[Replacement] = []
        self._inputs: dict[tuple[Node, Node], Node] = {}
        self._superseded: set[Node] = set()
        self._anchor: Node | None = None
        self._origin: Node | None = None
        self._note: dict[str, Any] = {}
        self._watched: list[tuple[Node, Node | None, Mark]] = []
        self._fake_mode = _find_fake_mode(self.graph.nodes)

    # Where new nodes go.

    def place_before(self, node: Node, **note: Any) -> None:
        """New nodes go directly before `node`, in the order they are made, and stand for it."""
        self._anchor, self._origin, self._note = node, node, note

    def place_after(self, node: Node, **note: Any) -> None:
        """New nodes go after `node` (and after all placeholders), in the order they are made, and stand for it."""
        anchor = node.next
        while anchor.op == "placeholder":
            anchor = anchor.next
        self._anchor, self._origin, self._note = anchor, node, note

    def annotate(self, **note: Any) -> None:
        """New nodes carry this provenance from here on; where they go stays as it is."""
        self._note = note

    def watch(self, node: Node, mark: Mark, reader: Node | None = None) -> None:
        """Put `mark` on the value of `node` when the dead are erased, or on what `reader` reads then in its place."""
        self._watched.append((node, reader, mark))

    # Making nodes.

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """One call of a plain function."""
        with self.graph.inserting_before(self._place()):
            node = self.graph.call_function(function, args, kwargs)
        return self._dress(node, self._run(function, args, kwargs))

    def attribute(self, target: str, value: torch.Tensor) -> Node:
        """A get_attr of a parameter or buffer of the graph module."""
        with self.graph.inserting_before(self._place()):
            # Graph.get_attr warns where a functional call has put a plain tensor in the place of a parameter.
            node = self.graph.create_node("get_attr", target)
        return self._dress(node, self._fake(value))

    def copy(self, path: list[Node], inputs: dict[Node, Node], *, beside: bool = False) -> Node:
        """Copy a stretch of nodes with other inputs and return the copy of its last node.

        `beside=True` puts each copy next to its original, lets readers of values inside the stretch read the copies,
        and marks the originals as superseded: they are erased once nothing reads them, whatever they do.
        """
        mapping = dict(inputs)
        for original in path:
            anchor = original.next if beside else self._place()
            with self.graph.inserting_before(anchor):
                node = self.graph.node_copy(original, lambda n: mapping.get(n, n))
            self._dress(node, original.meta["val"], original)
            mapping[original] = node
        if beside:
            self.supersede(path)
            self._move_inner_readers(path, mapping)
        return mapping[path[-1]]

    def _move_inner_readers(self, path: list[Node], mapping: dict[Node, Node]) -> None:
        inside = set(path)
        for original in path[:-1]:
            for user in list(original.users):
                if user not in inside and user is not mapping.get(original):
                    self.replace_input(user, original, mapping[original])

    # Changing nodes.

    def input_of(self, user: Node, state: Node) -> Node:
        """What `user` reads now where it read `state` before any edit."""
        return self._inputs.get((user, state), state)

    def entry_of(self, entry: Node, after: Node, opaque: Iterable[Node]) -> Node:
        """The node that a stream from `entry` to `after` starts from now.

        That is `entry`, unless an enclosing stream was rewritten before and let this one read another value.
        """
        moved = dict.fromkeys(self._inputs[user, old] for user, old in self._inputs if old is entry)
        for node in (*moved, entry):
            if _leads_to(node, after, opaque):
                return node
        raise EditError(f"the stream does not lead from {entry.name} to {after.name}")

    def replace_input(self, user: Node, old: Node, new: Node) -> None:
        """Let `user` read `new` in place of `old` (a node of the graph as it was found)."""
        current = self.input_of(user, old)
        if current is new:
            return
        user.replace_input_with(current, new)
        self._inputs[user, old] = new
        self.replacements.append(Replacement(user, old, new))

    def fork(self, user: Node, old: Node, new: Node, carriers: set[Node], path: set[Node]) -> None:
        """Like `replace_input` for a `user` that also carries the state (a slice both read and written back).

        `path` is the state's own way through its next event and keeps reading `old`; everyone else reads a copy. The
        copies follow the `carriers`, the part of the way that comes before the update.
        """
        with self.graph.inserting_before(user.next):
            node = self.graph.node_copy(user, lambda n: new if n is old else n)
        self._dress(node, user.meta["val"], user)
        for reader in list(user.users):
            if reader in carriers:
                self.fork(reader, user, node, carriers, path)
            elif reader not in path and reader is not node:
                self.replace_input(reader, user, node)

    def supersede(self, path: list[Node]) -> None:
        """The nodes of `path` have been replaced: erase them once nothing reads them, whatever they do."""
        self._superseded.update(path)

    def make_functional(self, node: Node) -> None:
        """Turn an in-place add, multiply, .. into its functional twin, so that earlier values stay what they were."""
        twin = functional_twin(node)
        if twin is not None:
            node.target = twin

    def erase_dead(self) -> None:
        """Once, after the last edit that may leave dead nodes: erase nodes made here, nodes they replaced, and what only those read."""
        candidates = set(self.emitted) | self._superseded | {r.old for r in self.replacements}
        for node in reversed(list(self.graph.nodes)):
            if node.users or node not in candidates or node.op in ("placeholder", "output"):
                continue
            if node.is_impure() and node not in self._superseded:
                continue
            candidates.update(node.all_input_nodes)
            self.graph.erase_node(node)
            self.emitted.pop(node, None)
        self._put_marks()

    def _put_marks(self) -> None:
        alive = set(self.graph.nodes)
        for node, reader, mark in self._watched:
            value = node if reader is None else self.input_of(reader, node)
            if value in alive:
                put(value, mark)

    # Details.

    def _place(self) -> Node:
        if self._anchor is None:
            raise EditError("the editor has no place for new nodes yet: call place_before or place_after first")
        return self._anchor

    def _dress(self, node: Node, value: object, origin: Node | None = None) -> Node:
        origin = origin or self._origin
        if origin is not None and origin is not node:
            node.meta.update({k: origin.meta[k] for k in _CARRIED_META if k in origin.meta})
        custom = without_marks(origin.meta.get("custom", {})) if origin is not None else {}
        node.meta["custom"] = {**custom, NOTE: dict(self._note)}
        node.meta["val"] = value
        self.emitted[node] = None
        return node

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> object:
        args, kwargs = map_arg((args, kwargs), value_of)
        mode: AbstractContextManager[object] = self._fake_mode or nullcontext()
        with mode, torch.no_grad():
            return getattr(function, "example", function)(*args, **kwargs)

    def _fake(self, value: torch.Tensor) -> object:
        if self._fake_mode is None:
            return value
        return self._fake_mode.from_tensor(value, static_shapes=True)


def value_of(node: Node) -> Any:
    """The example value of a node. Errors: EditError where capture left none."""
    if "val" not in node.meta:
        raise EditError(f"node {node.name} has no example value in meta['val']; capture the model again")
    return node.meta["val"]


def carrying_path(before: Node, after: Node, opaque: Iterable[Node]) -> list[Node]:
    """The nodes that carry the state from `before` (left out) to `after` (included), in order.

    Nothing is followed into an `opaque` node (the terms of a sum) nor past `before`.
    """
    path = _carriers(before, after, opaque)
    if not path or path[-1] is not after:
        raise EditError(f"the stream does not lead from {before.name} to {after.name}")
    return path


def _leads_to(before: Node, after: Node, opaque: Iterable[Node]) -> bool:
    return after in _carriers(before, after, opaque)


def _carriers(before: Node, after: Node, opaque: Iterable[Node]) -> list[Node]:
    closed = {before, *opaque} - {after}
    found: set[Node] = set()
    waiting = [after]
    while waiting:
        node = waiting.pop()
        if node in found or node in closed or node < before:
            continue
        found.add(node)
        waiting.extend(node.all_input_nodes)
    carriers = {before}
    path = []
    for node in sorted(found):
        if any(source in carriers for source in node.all_input_nodes):
            carriers.add(node)
            path.append(node)
    return path


def functional_twin(node: Node) -> Any | None:
    """The functional variant of an in-place target (`iadd`, `add_`, `aten.add_.Tensor`), None where it is none."""
    if node.op == "call_method":
        name = str(node.target)
        return name[:-1] if name.endswith("_") and not name.endswith("__") else None
    if node.op != "call_function":
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        return _functional_overload(node.target)
    name = getattr(node.target, "__name__", "")
    if getattr(node.target, "__module__", "") == "_operator" and name in _OPERATOR_TWINS:
        return _OPERATOR_TWINS[name]
    return None


def _functional_overload(overload: torch._ops.OpOverload) -> Any | None:
    namespace, _, name = overload._schema.name.partition("::")
    if not name.endswith("_") or not overload._schema.is_mutable:
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    return getattr(packet, overload._overloadname, None)


def _find_fake_mode(nodes: Iterable[Node]) -> Any | None:
    """The mode that made the graph's example values, so that new ones share its symbolic sizes."""
    for node in nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None:
            return mode
    return None
