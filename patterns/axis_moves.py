"""Where an axis of a value lies before and after views and reductions, counted from the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from resfx.patterns.dialect import LAYOUT, op_name, shape_of

REDUCTIONS = frozenset("mean var std var_mean std_mean norm linalg_vector_norm".split())
_ORDERED = frozenset("norm linalg_vector_norm".split())  # which norm it is comes before the axes
_POOLING = REDUCTIONS | frozenset("sum amax amin logsumexp".split())


def moves_axes(node: Node) -> bool:
    """May an axis lie elsewhere in `node` than in what it was made of?"""
    return op_name(node) in LAYOUT or op_name(node) in _POOLING or op_name(node) == "getitem"


def undo(moves: Sequence[Node], axis: int, size: Any = None) -> int | None:
    """The axis that ends up as `axis` after the moves, or as its inner part of that `size`."""
    found: int | None = axis
    for node in reversed(moves):
        found = None if found is None else _before(node, found, size)
    return found


def redo(moves: Sequence[Node], axis: int) -> int | None:
    """Where the axis ends up after the moves, the last one first."""
    found: int | None = axis
    for node in reversed(moves):
        found = None if found is None else _through(node, found, forward=True)
    return found


def reduced_axes(node: Node, rank: int) -> list[int] | None:
    """The axes that a reduction sums over, counted from the end; None where it takes them all."""
    position = 2 if op_name(node) in _ORDERED else 1
    dims = node.kwargs.get("dim", node.args[position] if len(node.args) > position else None)
    listed = list(dims) if isinstance(dims, (list, tuple)) else [dims]
    axes = [dim % rank - rank for dim in listed if isinstance(dim, int) and not isinstance(dim, bool)]
    return axes if axes and len(axes) == len(listed) else None


def _before(node: Node, axis: int, size: Any) -> int | None:
    if op_name(node) in _POOLING:
        return _before_reduction(node, axis)
    return _through(node, axis, forward=False, size=size)


def _before_reduction(node: Node, axis: int) -> int | None:
    source = _source(node)
    before, after = shape_of(source) if source is not None else None, _shape_of_result(node)
    gone = reduced_axes(node, len(before)) if before is not None else None
    if before is None or after is None or gone is None:
        return None
    if len(after) == len(before):
        return None if axis in gone else axis
    kept = [other for other in range(-len(before), 0) if other not in gone]
    return kept[axis] if len(kept) == len(after) else None


def _shape_of_result(node: Node) -> tuple[Any, ...] | None:
    """The shape of a reduction, which may be a pair of values."""
    shape = shape_of(node)
    return shape if shape is not None else next((s for user in node.users if (s := shape_of(user)) is not None), None)


def _source(node: Node) -> Node | None:
    source = node.args[0] if node.args else None
    return source if isinstance(source, Node) else None


def _permutation(node: Node, rank: int) -> list[int] | None:
    """`order[i]`: the input axis that becomes output axis i; None where `node` is no permutation."""
    name, args = op_name(node), node.args[1:]
    if name == "permute":
        dims: Any = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        return [int(d) % rank for d in dims]
    if name == "T":
        return list(range(rank))[::-1]
    if name == "transpose":
        a, b = (int(args[0]) % rank, int(args[1]) % rank) if len(args) == 2 else (rank - 2, rank - 1)  # type: ignore[arg-type]
        order = list(range(rank))
        order[a], order[b] = order[b], order[a]
        return order
    return None


def _through(node: Node, axis: int, forward: bool, size: Any = None) -> int | None:
    source = _source(node)
    before, after = shape_of(source) if source is not None else None, shape_of(node)
    if source is not None and op_name(node) == "getitem" and op_name(source) in _POOLING:
        return axis  # of a pair of statistics
    if before is None or after is None:
        return None
    order = _permutation(node, len(before))
    if order is not None:
        rank = len(order)
        return order.index(axis % rank) - rank if forward else order[axis % rank] - rank
    return _kept_axis(before, after, axis) if forward else _kept_axis(after, before, axis, size)


def _kept_axis(start: tuple[Any, ...], end: tuple[Any, ...], axis: int, size: Any = None) -> int | None:
    """The axis of `end` that has the same size (or the given one) and the same numbers behind it as `axis` of `start`."""
    size, behind = str(start[axis] if size is None else size), _numbers(start[len(start) + axis + 1 :])
    for candidate in range(-1, -len(end) - 1, -1):
        if str(end[candidate]) == size and _numbers(end[len(end) + candidate + 1 :]) == behind:
            return candidate
    return None


def _numbers(sizes: tuple[Any, ...]) -> tuple[int, tuple[str, ...]]:
    """A product of sizes as (number, symbols), so that symbolic sizes compare without guards."""
    number, symbols = 1, []
    for size in sizes:
        if isinstance(size, int):
            number *= size
        else:
            symbols.append(str(size))
    return number, tuple(sorted(symbols))
