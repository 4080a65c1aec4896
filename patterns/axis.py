"""The feature axis D of a stream: which axis its norms and weights work on.

Told by the operations next to the stream, not by the shape: what the branches first do with the state (a norm, a linear map,
a convolution), and where that tells nothing, what they last did before the add, or a learned gain of the state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from resfx.patterns import dialect
from resfx.patterns.dialect import ALIKE, EXPAND, LAYOUT, data_inputs, op_name, shape_of
from resfx.patterns.streams import Layout, Scale, Stream, Write

_CHANNELS_FIRST = frozenset(
    "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d batch_norm "
    "native_batch_norm _native_batch_norm_legit _batch_norm_with_update _batch_norm_no_update cudnn_batch_norm "
    "group_norm native_group_norm instance_norm".split()
)
_NORMS_LAST = frozenset("layer_norm native_layer_norm rms_norm _fused_rms_norm".split())
_LINEAR = frozenset("linear mm addmm matmul".split())
_RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())
_REDUCTIONS = frozenset("mean var std var_mean std_mean norm linalg_vector_norm".split())
_GROUPED = frozenset({"conv1d", "conv2d", "conv3d"})
_DEPTH = 8  # operations followed from the state into a branch, or back from an add


def feature_axis(stream: Stream) -> int | None:
    """D in the entry's layout, counted from the end; None where nothing tells, or what tells disagrees."""
    for votes in (_norm_votes(stream), _map_votes(stream), _output_votes(stream), _gain_votes(stream)):
        counted = Counter(votes).most_common(2)
        if len(counted) == 1 or (counted and counted[0][1] > counted[1][1]):
            return counted[0][0]
    return None


def _norm_votes(stream: Stream) -> Iterator[int]:
    return (axis for axis, is_norm in _reader_votes(stream) if is_norm)


def _map_votes(stream: Stream) -> Iterator[int]:
    return (axis for axis, _ in _reader_votes(stream))


def _reader_votes(stream: Stream) -> Iterator[tuple[int, bool]]:
    layouts = _layouts(stream)
    for reader in stream.readers:
        if reader.state not in layouts:  # a part of a state has a layout of its own
            continue
        if reader.role != "branch" and not _is_made_like(reader.user, reader.state):
            continue
        found = _first_map(reader.user, reader.state)
        if found is None:
            continue
        axis = _undo(layouts.get(reader.state, []), found[0])
        if axis is not None:
            yield axis, found[1]


def _is_made_like(node: Node, state: Node) -> bool:
    """Does it take its dtype or its shape from the state, and so stand for it in what follows?"""
    return op_name(node) in ALIKE and dialect.same_shape(node, state)


def _layouts(stream: Stream) -> dict[Node, list[Node]]:
    """For every state the view nodes that lie between it and the entry, in order."""
    current: list[Node] = []
    layouts = {stream.entry: current}
    for event in stream.events:
        if isinstance(event, Layout):
            current = [*current, event.after]
        layouts[event.after] = current
    return layouts


def _undo(layouts: list[Node], axis: int, size: Any = None) -> int | None:
    """The axis in the entry's layout that ends up as `axis` after the views, or as its inner part of that `size`."""
    found: int | None = axis
    for node in reversed(layouts):
        found = None if found is None else _before_view(node, found, size)
    return found


def _size_of_group(node: Node, source: Node, axis: int) -> Any:
    """How much of the axis one group of a convolution maps: the samples' channels, where it has a weight for each sample."""
    groups = node.kwargs.get("groups", node.args[6] if len(node.args) > 6 and op_name(node) in _GROUPED else None)
    shape = shape_of(source)
    groups = dialect.value(groups) if isinstance(groups, Node) else groups
    return None if groups is None or shape is None else shape[axis] // groups


def _first_map(user: Node, state: Node) -> tuple[int, bool] | None:
    """(axis of `state`, is it a norm) by the first operation downstream that works on one axis."""
    trail: list[Node] = []
    node, source = user, state
    for _ in range(_DEPTH):
        axis = _axis_of_input(node, source)
        if axis is not None:
            undone = _undo(trail, axis)
            if undone is None:
                undone = _undo(trail, axis, _size_of_group(node, source, axis))
            return None if undone is None else (undone, op_name(node) in _NORMS_LAST or op_name(node) in _REDUCTIONS)
        if op_name(node) in LAYOUT or op_name(node) == "getitem":
            trail.append(node)
        if not node.users:
            return None
        source, node = node, _preferred(node)
    return None


def _preferred(node: Node) -> Node:
    """Of several users the one that reduces or maps: a norm written by hand reads the state twice."""
    users = list(node.users)
    return next((u for u in users if _axis_of_input(u, node) is not None or op_name(u) in ("pow", "square")), users[0])


def _rank(node: Node) -> int | None:
    shape = shape_of(node)
    return None if shape is None else len(shape)


def _axis_of_input(node: Node, source: Node) -> int | None:
    """The axis of `source`, counted from the end, that `node` maps or normalises."""
    name, rank = op_name(node), _rank(source)
    if rank is None:
        return None
    if name in _CHANNELS_FIRST:
        return 1 - rank if rank >= 2 else None
    if name in _NORMS_LAST:
        shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
        return -1 if isinstance(shape, (list, tuple)) and len(shape) == 1 else None
    if name in _LINEAR and node.args and node.args[1 if name == "addmm" else 0] is source:
        return -1
    if name in _RECURRENT and node.args and node.args[0] is source:
        return -1
    if name in _REDUCTIONS:
        return _reduced_axis(node, rank)
    return None


def _reduced_axis(node: Node, rank: int) -> int | None:
    dims = node.kwargs.get("dim", next((a for a in node.args[1:] if isinstance(a, (list, tuple, int))), None))
    if isinstance(dims, (list, tuple)):
        dims = dims[0] if len(dims) == 1 else None
    if not isinstance(dims, int) or isinstance(dims, bool):
        return None
    return dims if dims < 0 else dims - rank


def _output_votes(stream: Stream) -> Iterator[int]:
    layouts = _layouts(stream)
    for event in stream.events:
        if not isinstance(event, Write):
            continue
        for branch in event.site.branches:
            axis = _axis_of_output(branch)
            undone = None if axis is None else _undo(layouts.get(event.before, []), axis)
            if undone is not None:
                yield undone


def _gain_votes(stream: Stream) -> Iterator[int]:
    """The state is scaled by a learned vector: one number a feature."""
    layouts = _layouts(stream)
    for event in stream.events:
        if not isinstance(event, Scale) or not isinstance(event.factor, Node) or not _is_learned(event.factor):
            continue
        shape = shape_of(event.factor) or ()
        long = [axis - len(shape) for axis, size in enumerate(shape) if size != 1]
        undone = _undo(layouts.get(event.before, []), long[0]) if len(long) == 1 else None
        if undone is not None:
            yield undone


def _is_learned(node: Node) -> bool:
    """Is the value made of parameters and constants alone?"""
    todo = [node]
    for _ in range(_DEPTH):
        if not todo:
            return True
        node = todo.pop()
        if node.op == "placeholder":
            return False
        todo.extend(data_inputs(node))
    return not todo


def _axis_of_output(node: Node) -> int | None:
    """The axis of an update along which the weights that made it lie, found by walking back to the last map."""
    trail: list[Node] = []
    for _ in range(_DEPTH):
        name, rank = op_name(node), _rank(node)
        if name in _CHANNELS_FIRST and rank is not None:
            return _redo(trail, 1 - rank)
        if name in _LINEAR or name in _NORMS_LAST:
            return _redo(trail, -1)
        if name in LAYOUT:
            trail.append(node)
        inputs = [i for i in data_inputs(node) if i.op != "get_attr"]
        following = next((i for i in inputs if name in LAYOUT or name in EXPAND or dialect.same_shape(i, node)), None)
        if following is None:
            return None
        node = following
    return None


def _redo(trail: list[Node], axis: int) -> int | None:
    found: int | None = axis
    for node in reversed(trail):
        found = None if found is None else _after_view(node, found)
    return found


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


def _after_view(node: Node, axis: int) -> int | None:
    """Where the input's axis (from the end) is in the output (from the end)."""
    source = _source(node)
    return None if source is None else _through(node, source, node, axis, forward=True)


def _before_view(node: Node, axis: int, size: Any = None) -> int | None:
    source = _source(node)
    return None if source is None else _through(node, source, node, axis, forward=False, size=size)


def _through(node: Node, source: Node, target: Node, axis: int, forward: bool, size: Any = None) -> int | None:
    before, after = shape_of(source), shape_of(target)
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
