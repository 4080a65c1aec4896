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

    Where features come last, products take matrices, one row a token: ONNX Runtime's vector-matrix product `Gemm(key, rows, transB=1)`
    takes a third of the time of `MatMul(values, key)`.
    """

    def __init__(self, op: Any, like: Value, dim: int) -> None:
        self.op = op
        self.like = like
        self.rank = len(like.shape)
        self.dim = dim % self.rank
        self.rows = self.dim == self.rank - 1
        self.dtype = type(like.dtype).FLOAT if like.dtype.name in ("FLOAT16", "BFLOAT16") else like.dtype

    def wide(self, x: Value) -> Value:
        """An argument in the dtype of statistics."""
        return x if x.dtype == self.dtype else self.op.Cast(x, to=self.dtype)

    def rounded(self, x: Value, dtype: Any = None) -> Value:
        """The result, in `dtype` or that of `like`."""
        target = self.like.dtype if dtype is None else dtype
        return x if target == self.dtype else self.op.Cast(x, to=target)

    def number(self, value: float) -> Value:
        return self.op.number(value, self.dtype)

    def along(self, vector: Value) -> Value:
        """[D], so that it broadcasts along the feature axis."""
        return vector if self.rows else self.op.Reshape(vector, self.op.ints(-1, *[1] * (self.rank - 1 - self.dim)))

    def joined(self, scalars: Sequence[Value]) -> Value:
        """One value per token each, side by side on the feature axis."""
        return self.op.Concat(*scalars, axis=self.dim)

    def apart(self, x: Value, count: int) -> list[Value]:
        """What `joined` put side by side."""
        return [x] if count == 1 else list(self.op.Split(x, axis=self.dim, num_outputs=count, outputs=count))

    def scores(self, values: Sequence[Value], key: Value, eps: float) -> Value:
        """key . rms(v) of every value, joined; `key` [D]."""
        op = self.op
        means = self.joined([op.ReduceMean(op.Mul(v, v), op.ints(self.dim), keepdims=1) for v in values])
        inverse = op.Reciprocal(op.Sqrt(op.Add(means, self.number(eps))))
        return op.Mul(op.Reshape(self.dots(values, key), op.Shape(means)), inverse)

    def dots(self, values: Sequence[Value], key: Value) -> Value:
        """key . v of every value, joined, or as a matrix with a row a token."""
        op = self.op
        if not self.rows:
            return self.joined(
                [op.ReduceSum(op.Mul(v, self.along(key)), op.ints(self.dim), keepdims=1) for v in values]
            )
        row, rows = op.Unsqueeze(key, op.ints(0)), [op.Flatten(v, axis=self.dim) for v in values]
        return op.Transpose(op.Concat(*[op.Gemm(row, v, transB=1) for v in rows], axis=0), perm=[1, 0])

    def attended(self, values: Sequence[Value], logits: Value) -> Value:
        """sum_i a_i v_i, a = softmax(logits), which are joined."""
        weights = self.apart(self.op.Softmax(logits, axis=self.dim), len(values))
        return reduce(self.op.Add, [self.op.Mul(v, a) for a, v in zip(weights, values, strict=True)])

    def rms(self, x: Value, eps: float, bias: Value) -> Value:
        """x / sqrt(mean(x^2) + eps), spelled as ONNX Runtime fuses it into one pass: with a gain, of ones, like `bias` [D]."""
        op = self.op
        mean = op.ReduceMean(op.Pow(x, self.number(2.0)), op.ints(self.dim), keepdims=1)
        normed = op.Div(x, op.Sqrt(op.Add(mean, self.number(eps))))
        return op.Mul(normed, op.Expand(self.number(1.0), op.Shape(bias))) if self.rows else normed

    def gate(self, bias: Value, *products: tuple[Value, Value]) -> Value:
        """sigmoid(sum of W x + bias): `products` are (x, weight [out, in]), `bias` [out]."""
        op = self.op
        if not self.rows:
            terms = [self.linear(x, weight) for x, weight in products]
            return op.Sigmoid(op.Add(reduce(op.Add, terms), self.along(bias)))
        total = bias
        for x, weight in products:
            total = op.Gemm(op.Flatten(x, axis=self.dim), weight, total, transB=1)
        return op.Reshape(op.Sigmoid(total), op.Shape(products[0][0]))

    def linear(self, x: Value, weight: Value) -> Value:
        """W x along a feature axis that is not the last."""
        op = self.op
        order = [axis for axis in range(self.rank) if axis != self.dim] + [self.dim]
        last = op.MatMul(op.Transpose(x, perm=order), op.Transpose(weight, perm=[1, 0]))
        return op.Transpose(last, perm=[order.index(axis) for axis in range(self.rank)])

    def blend(self, plain: Value, rest: Value, value: Value, amount: Value) -> Value:
        """rest plain + amount value."""
        return self.op.Add(self.op.Mul(plain, rest), self.op.Mul(value, amount))

    def rest(self, amount: Value) -> Value:
        """1 - amount."""
        return self.op.Sub(self.number(1.0), amount)


def _mixture(t: _Tokens, sources: Sequence[Value], query: Value, key_norm: Value, eps: float) -> Value:
    key = t.op.Mul(t.wide(query), t.wide(key_norm))
    values = [t.wide(source) for source in sources]
    return t.attended(values, t.scores(values, key, eps))


def _routed_read(
    op: Any,
    sources: Sequence[Value],
    query: Value,
    key_norm: Value,
    eps: float,
    dim: int,
    dtype: Any = None,
    **_: object,
) -> Value:
    t = _Tokens(op, sources[0], dim)
    return t.rounded(_mixture(t, sources, query, key_norm, eps), dtype)


def _delta_read(
    op: Any, h: Value, sources: Sequence[Value], query: Value, key_norm: Value, eps: float, dim: int, **_: object
) -> Value:
    t = _Tokens(op, h, dim)
    return t.rounded(op.Add(t.wide(h), _mixture(t, sources, query, key_norm, eps)))


def _single_read(op: Any, h: Value, source: Value) -> Value:
    t = _Tokens(op, h, -1)
    return t.rounded(op.Add(t.wide(h), t.wide(source)))


def _review_write(
    op: Any, h: Value, u: Value, weight: Value, bias: Value, eps: float, dim: int, factor: float = 1.0
) -> Value:
    t = _Tokens(op, h, dim)
    h, u, bias = t.wide(h), t.wide(u), t.wide(bias)
    of_h, of_u = op.Split(t.wide(weight), axis=1, num_outputs=2, outputs=2)
    gate = t.gate(bias, (t.rms(h, eps, bias), of_h), (t.rms(u, eps, bias), of_u))
    return t.rounded(_gated(t, h, u, gate, factor))


def _highway_write(op: Any, h: Value, u: Value, weight: Value, bias: Value, dim: int, factor: float = 1.0) -> Value:
    t = _Tokens(op, h, dim)
    h, u = t.wide(h), t.wide(u)
    return t.rounded(_gated(t, h, u, t.gate(t.wide(bias), (h, t.wide(weight))), factor))


def _gated(t: _Tokens, h: Value, u: Value, gate: Value, factor: float) -> Value:
    update = t.op.Mul(gate, u)
    if factor != 1.0:
        update = t.op.Mul(update, t.number(factor))
    return t.op.Add(h, update)


def _convex_highway_write(op: Any, h: Value, u: Value, weight: Value, bias: Value, dim: int) -> Value:
    t = _Tokens(op, h, dim)
    h, u = t.wide(h), t.wide(u)
    gate = t.gate(t.wide(bias), (h, t.wide(weight)))
    return t.rounded(t.blend(h, t.rest(gate), u, gate))


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
    return t.rounded(t.attended(values, _logits(t, values, w_alpha, eps)), dtype)


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
    values = [t.wide(stream) for stream in streams]
    gates = op.Sigmoid(op.Add(_logits(t, values, w_beta, eps), t.along(t.wide(b_beta))))
    return _mixed(t, values, t.wide(u), gates, dtype)


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
    first = op.Expand(t.along(t.wide(forget)), op.Shape(t.apart(logits, len(values))[0]))
    shares = op.Softmax(t.joined([first, logits]), axis=t.dim)
    gates = op.Slice(shares, op.ints(1), op.ints(len(values) + 1), op.ints(t.dim))
    return _mixed(t, values, t.wide(u), gates, dtype)


def _mixed(t: _Tokens, streams: Sequence[Value], u: Value, gates: Value, dtype: Any) -> list[Value]:
    """(1 - b_i) s_i + b_i u; the gates are joined."""
    parts = zip(streams, t.apart(t.rest(gates), len(streams)), t.apart(gates, len(streams)), strict=True)
    return [t.rounded(t.blend(s, rest, u, gate), dtype) for s, rest, gate in parts]


# The gates and blends that a read may end with stay what the exporter makes of them.
NAMED: dict[Callable[..., Any], tuple[str, Callable[..., Any]]] = {
    ops.delta_read: ("DeltaRead", _delta_read),
    ops.grouped_delta_read: ("DeltaRead", _delta_read),
    ops.single_read: ("DeltaRead", _single_read),
    ops.grouped_routed_read: ("AttentionResidualRead", _routed_read),
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
