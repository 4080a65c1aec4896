"""What torch operators without a translation of the exporter's own mean in ONNX. Imported only when one is met."""

from __future__ import annotations

from typing import Any, TypeVar

from onnxscript import FLOAT, ir, opset18

op: Any = opset18  # its type annotations leave out the constants that it takes
TensorType = TypeVar("TensorType", bound=FLOAT)
_LAST = 2**63 - 1


def grouped_mm(rows: TensorType, weight: TensorType, ends: TensorType) -> TensorType:
    """Rows [S, K] in sorted groups, times each group's own matrix of `weight` [E, K, M]: [S, M].

    Group e ends before row `ends[e]`; rows past the last group give zeros. One matrix product per group, so the
    arithmetic is that of the routed rows alone.
    """
    groups = weight.shape[0]  # type: ignore[index]
    last = op.Cast(ends, to=ir.DataType.INT64)
    first = [0]
    axis = [0]
    start: Any = op.Constant(value_ints=first)
    parts = []
    for group in range(groups):
        end = op.Slice(last, [group], [group + 1], axis)
        parts.append(op.MatMul(op.Slice(rows, start, end, axis), op.Gather(weight, group, axis=0)))
        start = end
    rest = op.Slice(op.Shape(op.Slice(rows, start, [_LAST], axis)), first, [1], axis)
    width = op.Slice(op.Shape(weight), [2], [3], axis)
    zero = op.CastLike(0.0, rows)
    parts.append(op.Expand(zero, op.Concat(rest, width, axis=0)))
    return op.Concat(*parts, axis=0)  # type: ignore[no-any-return]
