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
    """Nodes for values with one entry per token, and for what makes them: features on axis `dim`, statistics in `dtype`."""

    def __init__(self, op: Any, like: Value, dim: int) -> None:
        self.op = op
        self.rank = len(like.shape)
        self.dim = dim % self.rank
        self.result = like.dtype
        self.dtype = type(like.dtype).FLOAT if like.dtype.name in ("FLOAT16", "BFLOAT16") else like.dtype

    @property
    def is_last(self) -> bool:
        return self.dim == self.rank - 1

    def wide(self, x: Value) -> Value:
        """An argument in the dtype of statistics."""
        return x if x.dtype == self.dtype else self.op.Cast(x, to=self.dtype)

    def rounded(self, x: Value, dtype: Any = None) -> Value:
        target = self.result if dtype is None else dtype
        return x if target == self.dtype else self.op.Cast(x, to=target)

    def number(self, value: float) -> Value:
        return self.op.number(value, self.dtype)

    def along(self, vector: Value) -> Value:
        """[D], so that it broadcasts along the feature axis."""
        if self.is_last:
            return vector
        return self.op.Reshape(vector, self.op.ints(-1, *[1] * (self.rank - 1 - self.dim)))

    def total(self, x: Value) -> Value:
        return self.op.ReduceSum(x, self.op.ints(self.dim), keepdims=1)

    def inverse_rms(self, x: Value, eps: float) -> Value:
        op = self.op
        mean = op.ReduceMean(op.Mul(x, x), op.ints(self.dim), keepdims=1)
        return op.Reciprocal(op.Sqrt(op.Add(mean, self.number(eps))))

    def scores(self, x: Value, key: Value, eps: float) -> Value:
        """key . rms(x), `key` [D]."""
        return self.op.Mul(self.inverse_rms(x, eps), self.dot(x, key))

    def dot(self, x: Value, key: Value) -> Value:
        """key . x, `key` [D]."""
        if self.is_last:
            return self.op.MatMul(x, self.op.Unsqueeze(key, self.op.ints(1)))
        return self.total(self.op.Mul(x, self.along(key)))

    def softmax(self, logits: Sequence[Value]) -> list[Value]:
        """Over the list."""
        op = self.op
        powers = op.Softmax(op.Concat(*logits, axis=self.dim), axis=self.dim)
        return list(op.Split(powers, axis=self.dim, num_outputs=len(logits), outputs=len(logits)))

    def weighted(self, weights: Sequence[Value], values: Sequence[Value]) -> Value:
        return reduce(self.op.Add, [self.op.Mul(v, a) for a, v in zip(weights, values, strict=True)])

    def linear(self, x: Value, weight: Value) -> Value:
        """W x along the feature axis, `weight` [out, in]."""
        op = self.op
        if self.is_last:
            return op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
        order = [axis for axis in range(self.rank) if axis != self.dim] + [self.dim]
        last = op.MatMul(op.Transpose(x, perm=order), op.Transpose(weight, perm=[1, 0]))
        return op.Transpose(last, perm=[order.index(axis) for axis in range(self.rank)])

    def gate(self, h: Value, weight: Value, bias: Value) -> Value:
        return self.op.Sigmoid(self.op.Add(self.linear(h, self.wide(weight)), self.along(self.wide(bias))))

    def blend(self, plain: Value, value: Value, amount: Value) -> Value:
        return self.op.Add(plain, self.op.Mul(amount, self.op.Sub(value, plain)))


def _mixture(
    op: Any, sources: Sequence[Value], query: Value, key_norm: Value, eps: float, dim: int
) -> tuple[_Tokens, Value]:
    t = _Tokens(op, sources[0], dim)
    key = op.Mul(t.wide(query), t.wide(key_norm))
    values = [t.wide(source) for source in sources]
    weights = t.softmax([t.scores(v, key, eps) for v in values])
    return t, t.weighted(weights, values)


def _routed_read(
    op: Any, sources: Sequence[Value], query: Value, key_norm: Value, eps: float, dim: int, dtype: Any = None
) -> Value:
    t, mixed = _mixture(op, sources, query, key_norm, eps, dim)
    return t.rounded(mixed, dtype)


def _delta_read(
    op: Any, h: Value, sources: Sequence[Value], query: Value, key_norm: Value, eps: float, dim: int
) -> Value:
    _, mixed = _mixture(op, sources, query, key_norm, eps, dim)
    t = _Tokens(op, h, dim)
    return t.rounded(op.Add(t.wide(h), mixed))


def _single_read(op: Any, h: Value, source: Value) -> Value:
    t = _Tokens(op, h, -1)
    return t.rounded(op.Add(t.wide(h), t.wide(source)))


def _review_write(
    op: Any, h: Value, u: Value, weight: Value, bias: Value, eps: float, dim: int, factor: float = 1.0
) -> Value:
    t = _Tokens(op, h, dim)
    h, u = t.wide(h), t.wide(u)
    of_h, of_u = op.Split(t.wide(weight), axis=1, num_outputs=2, outputs=2)
    from_h = op.Mul(t.linear(h, of_h), t.inverse_rms(h, eps))
    from_u = op.Mul(t.linear(u, of_u), t.inverse_rms(u, eps))
    gate = op.Sigmoid(op.Add(op.Add(from_h, from_u), t.along(t.wide(bias))))
    return t.rounded(_gated(t, h, u, gate, factor))


def _highway_write(op: Any, h: Value, u: Value, weight: Value, bias: Value, dim: int, factor: float = 1.0) -> Value:
    t = _Tokens(op, h, dim)
    h, u = t.wide(h), t.wide(u)
    return t.rounded(_gated(t, h, u, t.gate(h, weight, bias), factor))


def _gated(t: _Tokens, h: Value, u: Value, gate: Value, factor: float) -> Value:
    update = t.op.Mul(gate, u)
    if factor != 1.0:
        update = t.op.Mul(update, t.number(factor))
    return t.op.Add(h, update)


def _convex_highway_write(op: Any, h: Value, u: Value, weight: Value, bias: Value, dim: int) -> Value:
    t = _Tokens(op, h, dim)
    h, u = t.wide(h), t.wide(u)
    return t.rounded(t.blend(h, u, t.gate(h, weight, bias)))


def _scaled_write(op: Any, h: Value, u: Value, factor: float, loops: int = 1) -> Value:
    t = _Tokens(op, h, -1)
    return t.rounded(op.Add(t.wide(h), op.Mul(t.wide(u), t.number(factor / loops))))


def _learned_scaled_write(op: Any, h: Value, u: Value, lam: Value, divisor: float, loops: int = 1) -> Value:
    t = _Tokens(op, h, -1)
    factor = op.Div(t.wide(lam), t.wide(op.number(divisor * loops, lam.dtype)))
    return t.rounded(op.Add(t.wide(h), op.Mul(t.wide(u), factor)))


def _pool(op: Any, streams: Sequence[Value], w_alpha: Value, eps: float, dim: int, dtype: Any = None) -> Value:
    t = _Tokens(op, streams[0], dim)
    values = [t.wide(stream) for stream in streams]
    weights = t.softmax(_logits(t, values, w_alpha, eps))
    return t.rounded(t.weighted(weights, values), dtype)


def _logits(t: _Tokens, streams: Sequence[Value], w: Value, eps: float) -> list[Value]:
    size = t.number(float(w.shape[0]) ** 0.5)
    key = t.op.Div(t.wide(w), size)
    return [t.scores(s, key, eps) for s in streams]


def _mixed(t: _Tokens, streams: Sequence[Value], u: Value, gates: Sequence[Value], dtype: Any) -> list[Value]:
    return [t.rounded(t.blend(s, t.wide(u), b), dtype) for s, b in zip(streams, gates, strict=True)]


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
    values = [t.wide(stream) for stream in streams]
    logits = op.Concat(*_logits(t, values, w_beta, eps), axis=t.dim)
    gates = op.Sigmoid(op.Add(logits, t.along(t.wide(b_beta))))
    parts = op.Split(gates, axis=t.dim, num_outputs=len(values), outputs=len(values)) if len(values) > 1 else [gates]
    return _mixed(t, values, u, parts, dtype)


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
    values = [t.wide(stream) for stream in streams]
    logits = _logits(t, values, w_beta, eps)
    first = op.Expand(op.Reshape(t.wide(forget), op.ints(*[1] * t.rank)), op.Shape(logits[0]))
    return _mixed(t, values, u, t.softmax([first, *logits])[1:], dtype)


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
