"""What the functions of `resfx.passes.ops` are in ONNX, and their names there: fewer and larger nodes than torch's own operators give.

Every body takes the arguments of its function. `op` makes the nodes, values are ONNX values with `shape` and `dtype`; the choice of
nodes follows what ONNX Runtime's CPU kernels do in the fewest passes over memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from resfx.passes import ops

Value = Any  # of an ONNX library that this package does not import


class _Tokens:
    """Nodes for values with features on axis `dim`, and for scalars per token; statistics in `dtype`, results in that of `like`.

    Values whose features come last become matrices, one row a token: ONNX Runtime's vector-matrix product `Gemm(key, rows, transB=1)`
    takes a third of the time of `MatMul(rows, key)`.
    """

    def __init__(self, op: Any, like: Value, dim: int) -> None:
        self.op = op
        self.like = like
        self.rank = len(like.shape)
        self.dim = dim % self.rank
        self.rows = self.dim == self.rank - 1
        self.axis = 1 if self.rows else self.dim
        self.dtype = type(like.dtype).FLOAT if like.dtype.name in ("FLOAT16", "BFLOAT16") else like.dtype

    def wide(self, x: Value) -> Value:
        """An argument in the dtype of statistics."""
        return x if x.dtype == self.dtype else self.op.Cast(x, to=self.dtype)

    def enter(self, x: Value) -> Value:
        """An argument like the stream, as the nodes here take it."""
        return self.op.Flatten(self.wide(x), axis=self.dim) if self.rows else self.wide(x)

    def leave(self, x: Value, dtype: Any = None) -> Value:
        """The result, like the stream again."""
        return self.rounded(self.op.Reshape(x, self.op.Shape(self.like)) if self.rows else x, dtype)

    def rounded(self, x: Value, dtype: Any = None) -> Value:
        target = self.like.dtype if dtype is None else dtype
        return x if target == self.dtype else self.op.Cast(x, to=target)

    def number(self, value: float) -> Value:
        return self.op.number(value, self.dtype)

    def along(self, vector: Value) -> Value:
        """[D], so that it broadcasts along the feature axis."""
        return vector if self.rows else self.op.Reshape(vector, self.op.ints(-1, *[1] * (self.rank - 1 - self.dim)))

    def joined(self, scalars: Sequence[Value]) -> Value:
        """One value per token each, side by side on the feature axis."""
        return self.op.Concat(*scalars, axis=self.axis)

    def apart(self, x: Value, count: int) -> list[Value]:
        return [x] if count == 1 else self.op.Split(x, axis=self.axis, num_outputs=count, outputs=count)  # type: ignore[no-any-return]

    def scores(self, values: Sequence[Value], key: Value, eps: float) -> Value:
        """key . rms(v) of every value, joined; `key` [D]."""
        op = self.op
        means = self.joined([op.ReduceMean(op.Mul(v, v), op.ints(self.axis), keepdims=1) for v in values])
        inverse = op.Reciprocal(op.Sqrt(op.Add(means, self.number(eps))))
        return op.Mul(self.joined([self.dot(v, key) for v in values]), inverse)

    def dot(self, x: Value, key: Value) -> Value:
        op = self.op
        if not self.rows:
            return op.ReduceSum(op.Mul(x, self.along(key)), op.ints(self.axis), keepdims=1)
        return op.Reshape(op.Gemm(op.Unsqueeze(key, op.ints(0)), x, transB=1), op.ints(-1, 1))

    def softmax(self, logits: Value, count: int) -> list[Value]:
        return self.apart(self.op.Softmax(logits, axis=self.axis), count)

    def weighted(self, weights: Sequence[Value], values: Sequence[Value]) -> Value:
        return reduce(self.op.Add, [self.op.Mul(v, a) for a, v in zip(weights, values, strict=True)])

    def rms(self, x: Value, eps: float, bias: Value) -> Value:
        """x / sqrt(mean(x^2) + eps), spelled as ONNX Runtime fuses it into one pass: with a gain, of ones, like `bias` [D]."""
        op = self.op
        mean = op.ReduceMean(op.Pow(x, self.number(2.0)), op.ints(self.axis), keepdims=1)
        normed = op.Div(x, op.Sqrt(op.Add(mean, self.number(eps))))
        return op.Mul(normed, op.Expand(self.number(1.0), op.Shape(bias))) if self.rows else normed

    def linear(self, x: Value, weight: Value, add: Value | None = None) -> Value:
        """W x + add along the feature axis, `weight` [out, in], `add` like the result or [out]."""
        op = self.op
        if self.rows:
            return op.Gemm(x, weight, *([] if add is None else [add]), transB=1)
        order = [axis for axis in range(self.rank) if axis != self.dim] + [self.dim]
        last = op.MatMul(op.Transpose(x, perm=order), op.Transpose(weight, perm=[1, 0]))
        result = op.Transpose(last, perm=[order.index(axis) for axis in range(self.rank)])
        return result if add is None else op.Add(result, add)

    def gate(self, h: Value, weight: Value, bias: Value) -> Value:
        return self.op.Sigmoid(self.linear(h, self.wide(weight), self.along(self.wide(bias))))

    def blend(self, plain: Value, value: Value, amount: Value) -> Value:
        """(1 - amount) plain + amount value."""
        op = self.op
        return op.Add(op.Mul(plain, op.Sub(self.number(1.0), amount)), op.Mul(value, amount))


def _mixture(t: _Tokens, sources: Sequence[Value], query: Value, key_norm: Value, eps: float) -> Value:
    key = t.op.Mul(t.wide(query), t.wide(key_norm))
    values = [t.enter(source) for source in sources]
    return t.weighted(t.softmax(t.scores(values, key, eps), len(values)), values)


def _routed_read(
    op: Any, sources: Sequence[Value], query: Value, key_norm: Value, eps: float, dim: int, dtype: Any = None
) -> Value:
    t = _Tokens(op, sources[0], dim)
    return t.leave(_mixture(t, sources, query, key_norm, eps), dtype)


def _delta_read(
    op: Any, h: Value, sources: Sequence[Value], query: Value, key_norm: Value, eps: float, dim: int
) -> Value:
    t = _Tokens(op, h, dim)
    return t.leave(op.Add(t.enter(h), _mixture(t, sources, query, key_norm, eps)))


def _single_read(op: Any, h: Value, source: Value) -> Value:
    t = _Tokens(op, h, -1)
    return t.rounded(op.Add(t.wide(h), t.wide(source)))


def _review_write(
    op: Any, h: Value, u: Value, weight: Value, bias: Value, eps: float, dim: int, factor: float = 1.0
) -> Value:
    t = _Tokens(op, h, dim)
    h, u = t.enter(h), t.enter(u)
    of_h, of_u = op.Split(t.wide(weight), axis=1, num_outputs=2, outputs=2)
    from_h = t.linear(t.rms(h, eps, bias), of_h, t.along(t.wide(bias)))
    return t.leave(_gated(t, h, u, op.Sigmoid(t.linear(t.rms(u, eps, bias), of_u, from_h)), factor))


def _highway_write(op: Any, h: Value, u: Value, weight: Value, bias: Value, dim: int, factor: float = 1.0) -> Value:
    t = _Tokens(op, h, dim)
    h, u = t.enter(h), t.enter(u)
    return t.leave(_gated(t, h, u, t.gate(h, weight, bias), factor))


def _gated(t: _Tokens, h: Value, u: Value, gate: Value, factor: float) -> Value:
    update = t.op.Mul(gate, u)
    if factor != 1.0:
        update = t.op.Mul(update, t.number(factor))
    return t.op.Add(h, update)


def _convex_highway_write(op: Any, h: Value, u: Value, weight: Value, bias: Value, dim: int) -> Value:
    t = _Tokens(op, h, dim)
    h, u = t.enter(h), t.enter(u)
    return t.leave(t.blend(h, u, t.gate(h, weight, bias)))


def _scaled_write(op: Any, h: Value, u: Value, factor: float, loops: int = 1) -> Value:
    t = _Tokens(op, h, -1)
    return t.rounded(op.Add(t.wide(h), op.Mul(t.wide(u), t.number(factor / loops))))


def _learned_scaled_write(op: Any, h: Value, u: Value, lam: Value, divisor: float, loops: int = 1) -> Value:
    t = _Tokens(op, h, -1)
    factor = op.Div(t.wide(lam), t.wide(op.number(divisor * loops, lam.dtype)))
    return t.rounded(op.Add(t.wide(h), op.Mul(t.wide(u), factor)))


def _pool(op: Any, streams: Sequence[Value], w_alpha: Value, eps: float, dim: int, dtype: Any = None) -> Value:
    t = _Tokens(op, streams[0], dim)
    values = [t.enter(stream) for stream in streams]
    return t.leave(t.weighted(t.softmax(_logits(t, values, w_alpha, eps), len(values)), values), dtype)


def _logits(t: _Tokens, streams: Sequence[Value], w: Value, eps: float) -> Value:
    size = t.number(float(w.shape[0]) ** 0.5)
    return t.scores(streams, t.op.Div(t.wide(w), size), eps)


def _independent_mix(
    op: Any,
    streams: Sequence[Value],
    u: Value,
    w_beta: Value,
    b_beta: Value,
    eps: float,
    dim: int,
    dtype: Any = None,
) -> list[Value]:
    t = _Tokens(op, streams[0], dim)
    values = [t.enter(stream) for stream in streams]
    gates = op.Sigmoid(op.Add(_logits(t, values, w_beta, eps), t.along(t.wide(b_beta))))
    return _mixed(t, values, t.enter(u), t.apart(gates, len(values)), dtype)


def _competitive_mix(
    op: Any,
    streams: Sequence[Value],
    u: Value,
    w_beta: Value,
    forget: Value,
    eps: float,
    dim: int,
    dtype: Any = None,
) -> list[Value]:
    t = _Tokens(op, streams[0], dim)
    values = [t.enter(stream) for stream in streams]
    logits = _logits(t, values, w_beta, eps)
    one = t.apart(logits, len(values))[0]
    first = op.Expand(t.along(t.wide(forget)), op.Shape(one))
    return _mixed(t, values, t.enter(u), t.softmax(t.joined([first, logits]), len(values) + 1)[1:], dtype)


def _mixed(t: _Tokens, streams: Sequence[Value], u: Value, gates: Sequence[Value], dtype: Any) -> list[Value]:
    return [t.leave(t.blend(s, u, b), dtype) for s, b in zip(streams, gates, strict=True)]


# The gates and blends that a read may end with stay what the exporter makes of them.
NAMED: dict[Callable[..., Any], tuple[str, Callable[..., Any]]] = {
    ops.delta_read: ("DeltaRead", _delta_read),
    ops.single_read: ("DeltaRead", _single_read),
    ops.routed_read: ("AttentionResidualRead", _routed_read),
    ops.pool: ("MultiGatePool", _pool),
    ops.independent_mix: ("MultiGateWrite", _independent_mix),
    ops.competitive_mix: ("MultiGateWrite", _competitive_mix),
    ops.review_write: ("ReviewWrite", _review_write),
    ops.highway_write: ("HighwayWrite", _highway_write),
    ops.convex_highway_write: ("HighwayWrite", _convex_highway_write),
    ops.scaled_write: ("ScaledLoopWrite", _scaled_write),
    ops.learned_scaled_write: ("ScaledLoopWrite", _learned_scaled_write),
}
