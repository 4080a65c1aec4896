"""Where a part of a value lies in it, by example sizes: a slice, a narrow, one piece of a split.

Sizes may be symbols: they are compared as expressions, so that no guard is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.fx import Node

from resfx.patterns import dialect
from resfx.patterns.dialect import SPLIT, equal_shapes, op_name, same_shape, shape_of


class Place(NamedTuple):
    """`base`, behind slices that take all of it, from `start` to `end` along `axis`, counted from the front."""

    base: Node
    axis: int
    start: Any
    end: Any


def place_of(part: Node) -> Place | None:
    """Where `part` lies; None where it is no such part, or can't be told."""
    source = part.args[0] if part.args else None
    if not isinstance(source, Node) or is_whole_slice(part):
        return None
    name = op_name(part)
    if name in ("slice", "narrow"):
        place = _sliced(part, source, name)
    elif name == "unsqueeze":
        place = _selected(part, source)
    elif name == "getitem" and op_name(source) in SPLIT and isinstance(part.args[1], int):
        place = _split_off(part.args[1], source)
    else:
        return None
    return place and place._replace(base=_behind_whole_slices(place.base))


def _sliced(part: Node, base: Node, name: str) -> Place | None:
    whole, own = shape_of(base), shape_of(part)
    axis, start, step = (_argument(part, i, default) for i, default in ((1, 0), (2, None), (4, 1)))
    start = dialect.value(start) if isinstance(start, Node) else start or 0
    if whole is None or own is None or not isinstance(axis, int) or start is None or (step != 1 and name == "slice"):
        return None
    start = start + whole[axis] if isinstance(start, int) and start < 0 else start
    return Place(base, axis % len(whole), start, start + own[axis])


def _selected(part: Node, select: Node) -> Place | None:
    """`x[:, 0].unsqueeze(1)`: a slice of one."""
    base, axis, index = (_argument(select, i, None) for i in range(3))
    whole = shape_of(base) if isinstance(base, Node) else None
    if op_name(select) != "select" or whole is None or not isinstance(axis, int) or not isinstance(index, int):
        return None
    axis, again = axis % len(whole), _argument(part, 1, None)
    if not isinstance(again, int) or again % len(whole) != axis:
        return None
    start = index + whole[axis] if index < 0 else index
    return Place(base, axis, start, start + 1)


def _argument(node: Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default


def _split_off(index: int, split: Node) -> Place | None:
    base, parts = split.args[0], dialect.value(split)
    axis = split.kwargs.get("dim", split.args[2] if len(split.args) > 2 else 0)
    whole = shape_of(base) if isinstance(base, Node) else None
    if whole is None or not isinstance(base, Node) or not isinstance(parts, (list, tuple)) or not isinstance(axis, int):
        return None
    if any(part.dim() != len(whole) for part in parts):
        return None  # unbind, which takes the axis away
    ends = [sum(part.shape[axis] for part in parts[:count]) for count in (index, index + 1)]
    return Place(base, axis % len(whole), *ends)


def pieces_of(cat: Node) -> list[tuple[Node, Place]]:
    """The values that `cat` joins and where each lies in it, those of a `cat` inside included; none where sizes aren't known."""
    shape = shape_of(cat)
    axis = cat.kwargs.get("dim", cat.args[1] if len(cat.args) > 1 else 0)
    if op_name(cat) != "cat" or shape is None or not isinstance(axis, int):
        return []
    axis, end = axis % len(shape), 0
    found: list[tuple[Node, Place]] = []
    todo = list(reversed(_listed(cat)))
    while todo:
        piece = todo.pop()
        own = shape_of(piece) if isinstance(piece, Node) else None
        if own is None or len(own) != len(shape):
            return []
        if op_name(piece) == "cat" and _same_axis(piece, axis, len(shape)):
            todo.extend(reversed(_listed(piece)))
            continue
        found.append((piece, Place(cat, axis, end, end + own[axis])))
        end = end + own[axis]
    return found


def _listed(cat: Node) -> list[Any]:
    listed = cat.args[0] if cat.args else cat.kwargs.get("tensors")
    return list(listed) if isinstance(listed, (list, tuple)) else []


def _same_axis(cat: Node, axis: int, rank: int) -> bool:
    own = cat.kwargs.get("dim", cat.args[1] if len(cat.args) > 1 else 0)
    return isinstance(own, int) and own % rank == axis


def is_whole_slice(node: Node) -> bool:
    """`x[:]` along some axis, also where the end is written out: `x[:, : x.size(1)]`."""
    if op_name(node) != "slice":
        return False
    start, end, step = (list(node.args[2:]) + [None] * 3)[:3]
    if step not in (None, 1):
        return False
    source = node.args[0]
    return (start in (None, 0) and is_open_end(end)) or (isinstance(source, Node) and same_shape(source, node))


def is_open_end(end: object) -> bool:
    """Does a slice with this end go on to the end? ATen writes the largest integer where Python leaves it out."""
    return end is None or (isinstance(end, int) and end >= 2**62)


def whole_slices(node: Node) -> Iterator[Node]:
    """`node` and what it is a whole slice of, as long as these are whole slices."""
    while is_whole_slice(node) and isinstance(node.args[0], Node):
        yield node
        node = node.args[0]


def _behind_whole_slices(node: Node) -> Node:
    *_, base = node, *(sliced.args[0] for sliced in whole_slices(node))
    assert isinstance(base, Node)
    return base


def same_place(left: Place, right: Place) -> bool:
    """Do both lie at the same place, whatever they are parts of?"""
    return left.axis == right.axis and equal_shapes(left[2:], right[2:])


def piece_taken(part: Node) -> Node | None:
    """The one value that `part` takes out again of a `cat`: `cat([a, b])[:, : a.size(1)]` is `a`."""
    place = place_of(part)
    if place is None or op_name(place.base) != "cat":
        return None
    return next((piece for piece, at in pieces_of(place.base) if same_place(at, place)), None)


def joined_into(before: Node, part: Node) -> Node | None:
    """The `cat` that `before` lies in, where `part` takes it out again."""
    place = place_of(part)
    return place.base if place is not None and piece_taken(part) is before else None
