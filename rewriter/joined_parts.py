"""Parts of a state that are read on after it is whole again are read from the whole.

    t = x[:, 1:] + f(x);  y = g(t);  x = cat([x[:, :1], t], 1)    ->    x = cat([x[:, :1], t], 1);  y = g(x[:, 1:])

So the search sees that `y` is computed from the state, and a form can give it what it reads. The same numbers in the same layout.
"""

from __future__ import annotations

import sys

import torch
from torch import fx

from resfx.patterns.dialect import call_entries, equal_shapes, op_name
from resfx.patterns.places import Place, pieces_of
from resfx.patterns.slices import added_to_part, strip
from resfx.twins import fake_result

aten = torch.ops.aten


def read_parts_of_the_whole(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Let later readers of the parts read slices of the whole, in place; returns what they read now by what they read before."""
    moved: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        found = added_to_part(node) if op_name(node) == "cat" else None
        if found is not None:
            moved.update(_read_from(graph, node, found[1]))
    return moved


def _read_from(graph: fx.Graph, cat: fx.Node, updated: fx.Node) -> dict[fx.Node, fx.Node]:
    pieces = pieces_of(cat)
    if {part for part, _ in pieces} != set(cat.all_input_nodes):
        return {}  # a cat of cats
    piece = next(part for part, _ in pieces if strip(part) is updated)
    joined = _after_the(piece, cat)
    if any(call_entries(node) != call_entries(piece) for node in joined):
        return {}  # another module's: its nodes stay together
    late = {part: [u for u in part.users if piece < u and u not in joined] for part, _ in pieces}
    if not late[piece]:
        return {}
    for node in reversed(joined):
        piece.append(node)
    moved = {}
    for part, place in pieces:
        taken = _slice(graph, cat, part, place) if late[part] else None
        if taken is None:
            continue
        for reader in late[part]:
            reader.replace_input_with(part, taken)
        moved[part] = taken
    return moved


def _after_the(piece: fx.Node, cat: fx.Node) -> list[fx.Node]:
    """`cat` and what it is computed from after `piece` was, in order: the other parts may be taken out late."""
    found, todo = {cat}, [cat]
    while todo:
        inputs = [i for i in todo.pop().all_input_nodes if piece < i and i not in found]
        found.update(inputs)
        todo.extend(inputs)
    return sorted(found)


def _slice(graph: fx.Graph, cat: fx.Node, part: fx.Node, place: Place) -> fx.Node | None:
    """The part, taken out of `cat`; None where its bounds are open or its layout in memory, which a view may rely on, is a special one."""
    whole, value = cat.meta["val"], part.meta["val"]
    end = sys.maxsize if str(place.end) == str(whole.shape[place.axis]) else place.end
    if not isinstance(place.start, int) or not isinstance(end, int):
        return None
    kept = equal_shapes(value.stride(), whole.stride())
    packed = torch.empty_like(value, memory_format=torch.contiguous_format)
    if not kept and not equal_shapes(value.stride(), packed.stride()):
        return None
    taken = _after(graph, cat, aten.slice.Tensor, cat, place.axis, place.start, end)
    return taken if kept else _after(graph, taken, aten.contiguous.default, taken)


def _after(graph: fx.Graph, before: fx.Node, target: torch._ops.OpOverload, *args: fx.node.Argument) -> fx.Node:
    with graph.inserting_after(before):
        node = graph.call_function(target, args)
    node.meta = {k: v for k, v in before.meta.items() if k not in ("val", "example_value", "tensor_meta")}
    node.meta["val"] = fake_result(node)
    return node
