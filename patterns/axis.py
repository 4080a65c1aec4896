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
from resfx.patterns.axis_moves import REDUCTIONS, moves_axes, redo, reduced_axes, undo
from resfx.patterns.dialect import ALIKE, EXPAND, LAYOUT, data_inputs, op_name, shape_of
from resfx.patterns.hand_norms import is_divided_by
from resfx.patterns.streams import Layout, Scale, Stream, Write

_CHANNELS_FIRST = frozenset(
    "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d batch_norm "
    "native_batch_norm _native_batch_norm_legit _batch_norm_with_update _batch_norm_no_update cudnn_batch_norm "
    "group_norm native_group_norm instance_norm".split()
)
_NORMS_LAST = frozenset("layer_norm native_layer_norm rms_norm _fused_rms_norm".split())
_LINEAR = frozenset("linear mm addmm matmul".split())
_RECURRENT = frozenset("lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split())
_GROUPED = frozenset({"conv1d", "conv2d", "conv3d"})
_DEPTH = 8  # operations followed from the state into a branch, or back from an add
_MOST = 256  # operations looked through for where a factor comes from


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
        axis = undo(layouts.get(reader.state, []), found[0])
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


def _size_of_group(node: Node, source: Node, axis: int) -> Any:
    """How much of the axis one group of a convolution maps: the samples' channels, where it has a weight for each sample."""
    groups = node.kwargs.get("groups", node.args[6] if len(node.args) > 6 and op_name(node) in _GROUPED else None)
    shape = shape_of(source)
    groups = dialect.value(groups) if isinstance(groups, Node) else groups
    return None if groups is None or shape is None else shape[axis] // groups


def _first_map(user: Node, state: Node) -> tuple[int, bool] | None:
    """(axis of `state`, is it a norm) by the first operation downstream that works on one axis.

    A mean that nothing is divided by pools: what is mapped then is what it left.
    """
    moves: list[Node] = []
    node, source = user, state
    values = [state]
    for _ in range(_DEPTH):
        axis = _normed_axis(node, source, values)
        is_norm = axis is not None
        if axis is None:
            axis = _mapped_axis(node, source, state)
        if axis is not None:
            undone = undo(moves, axis)
            if undone is None:
                undone = undo(moves, axis, _size_of_group(node, source, axis))
            return None if undone is None else (undone, is_norm)
        moves = [*_since_pooled(moves, node), node] if moves_axes(node) else _since_pooled(moves, node)
        if not node.users:
            return None
        values.append(node)
        source, node = node, _preferred(node)
    return None


def _since_pooled(moves: list[Node], node: Node) -> list[Node]:
    """The moves that still count in `node`: what was pooled and has met its source again lies as that does."""
    for position, move in enumerate(moves):
        source = move.all_input_nodes[0]
        if not dialect.same_shape(move, source) and op_name(move) not in LAYOUT and dialect.same_shape(node, source):
            return moves[:position]
    return moves


def _preferred(node: Node) -> Node:
    """Of several users the one that reduces or maps: a norm written by hand reads the state twice."""
    users = list(node.users)
    telling = (u for u in users if _works_on_one_axis(u, node) or op_name(u) in ("pow", "square"))
    return next(telling, users[0])


def _works_on_one_axis(node: Node, source: Node) -> bool:
    return (
        op_name(node) in REDUCTIONS or _normed_axis(node, source) is not None or _mapped_axis(node, source) is not None
    )


def _rank(node: Node) -> int | None:
    shape = shape_of(node)
    return None if shape is None else len(shape)


def _normed_axis(node: Node, source: Node, values: list[Node] | None = None) -> int | None:
    """The axis of `source`, counted from the end, over which `node` norms, or takes the statistic of a norm of the values."""
    name, rank = op_name(node), _rank(source)
    if name in _NORMS_LAST:
        shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
        return -1 if isinstance(shape, (list, tuple)) and len(shape) == 1 else None
    if name not in REDUCTIONS or rank is None or values is None:
        return None
    axes = reduced_axes(node, rank)
    return axes[0] if axes is not None and len(axes) == 1 and is_divided_by(node, values) else None


def _mapped_axis(node: Node, source: Node, state: Node | None = None) -> int | None:
    """The axis of `source`, counted from the end, that `node` maps."""
    name, rank = op_name(node), _rank(source)
    if rank is None:
        return None
    if name in _CHANNELS_FIRST:
        return 1 - rank if rank >= 2 else None
    if name in _LINEAR and node.args and node.args[1 if name == "addmm" else 0] is source:
        return None if state is not None and _weighs_by_itself(node, source, state) else -1
    if name in _RECURRENT and node.args and node.args[0] is source:
        return -1
    return None


def _weighs_by_itself(product: Node, source: Node, state: Node) -> bool:
    """Is what the product multiplies `source` with computed from the state too, as attention weights are? Then it's no weight."""
    todo = [i for i in data_inputs(product) if i is not source]
    seen: set[Node] = set()
    while todo and len(seen) < _MOST:
        node = todo.pop()
        if node is state:
            return True
        if node not in seen and state < node:
            seen.add(node)
            todo.extend(data_inputs(node))
    return False


def _output_votes(stream: Stream) -> Iterator[int]:
    layouts = _layouts(stream)
    for event in stream.events:
        if not isinstance(event, Write):
            continue
        for branch in event.site.branches:
            axis = _axis_of_output(branch)
            undone = None if axis is None else undo(layouts.get(event.before, []), axis)
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
        undone = undo(layouts.get(event.before, []), long[0]) if len(long) == 1 else None
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
            return redo(trail, 1 - rank)
        if name in _LINEAR or name in _NORMS_LAST:
            return redo(trail, -1)
        if name in LAYOUT:
            trail.append(node)
        inputs = [i for i in data_inputs(node) if i.op != "get_attr"]
        following = next((i for i in inputs if name in LAYOUT or name in EXPAND or dialect.same_shape(i, node)), None)
        if following is None:
            return None
        node = following
    return None
