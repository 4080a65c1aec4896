"""The functions that the forms put into a graph: plain torch code, no state, parameters as arguments.

Shapes: `h` and every source have the stream's shape, with D entries on axis `dim`; vectors are [D], matrices [out, in].
Statistics, softmax and gates are computed in the dtype of `resfx.passes.statistics`; autocast is off inside; results have the
dtype of `h`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from resfx.passes import gating
from resfx.passes.group_read import group_partials
from resfx.passes.products import wide_linear
from resfx.passes.routing import Older, mixture
from resfx.passes.statistics import along, full_precision, inverse_rms, wide
from resfx.passes.stored import scaled_sum, stored

Scalar = float | Tensor
_F = TypeVar("_F", bound=Callable[..., Any])


def _example(example: Callable[..., object]) -> Callable[[_F], _F]:
    """Attach what the editor runs in place of the function to learn its result's shape and dtype.

    For functions of a growing list of sources: to run them at every site would cost quadratic time.
    """

    def attach(function: _F) -> _F:
        function.example = example  # type: ignore[attr-defined]
        return function

    return attach


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A value like `x`, as an example: `x` itself where it can be, for a new one of open sizes takes a millisecond."""
    if dtype in (None, x.dtype) and _is_contiguous(x):
        return x
    return x.new_empty(x.shape, dtype=dtype)


def _is_contiguous(x: Tensor) -> bool:
    """Also where a size depends on the data, and nobody can tell: then it counts as not."""
    try:
        return x.is_contiguous()
    except GuardOnDataDependentSymNode:
        return False


def _like_state(h: Tensor, *_: object) -> Tensor:
    return _like(h)


def _like_first_source(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm: Tensor,
    eps: float,
    dim: int,
    dtype: torch.dtype | None = None,
    *_: object,
) -> Tensor:
    return _like(sources[0], dtype=dtype)


@_example(_like_first_source)
def routed_read(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm: Tensor,
    eps: float,
    dim: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """sum_i a_i v_i, a = softmax_i(query . (rms(v_i) * key_norm)), in `dtype`, else in that of the first source."""
    with full_precision(sources[0]):
        return mixture(sources, query, key_norm, eps, dim, dtype=dtype or sources[0].dtype)


@_example(_like_state)
def delta_read(h: Tensor, sources: Sequence[Tensor], query: Tensor, key_norm: Tensor, eps: float, dim: int) -> Tensor:
    """h + sum_i a_i v_i, a = softmax_i(query . (rms(v_i) * key_norm))."""
    with full_precision(h):
        return mixture(sources, query, key_norm, eps, dim, dtype=h.dtype, onto=h)


def _ungrouped(_: object, sources: object, queries: Sequence[Tensor], *__: object) -> list[list[Tensor]]:
    return [[] for _ in range(2 + len(queries))]


@_example(_ungrouped)
def group_read(
    earlier: Sequence[Tensor],
    sources: Sequence[Tensor],
    queries: Sequence[Tensor],
    key_norms: Sequence[Tensor],
    eps: float,
    dim: int,
    with_sum: bool,
    is_last: bool,
) -> list[list[Tensor]]:
    """What several readers, one for each query, are to read of the sources they have in common: those of an earlier group and these.

    First what a later group needs (`is_last`: none comes), then the sum of the sources (`with_sum`), then a list for each reader. All are
    empty where a read over all of its sources costs less: anywhere but on a GPU.
    """
    with full_precision(sources[0]):
        group = group_partials(earlier, sources, queries, key_norms, eps, dim, with_sum, is_last)
    return _ungrouped(earlier, sources, queries) if group is None else group


@_example(lambda total, h: _like(h))
def sum_of(total: Sequence[Tensor], h: Tensor) -> Tensor:
    """`h`, the sum of a group's sources; from the group where it has that, and another pass over them is saved."""
    return total[0] if total and total[0].dtype == h.dtype else h


def _still_to_read(
    sources: Sequence[Tensor], earlier: Sequence[Tensor], known: int
) -> tuple[Sequence[Tensor], Older | None]:
    return (sources[known:], Older(*earlier)) if earlier else (sources, None)


@_example(_like_first_source)
def grouped_routed_read(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm: Tensor,
    eps: float,
    dim: int,
    dtype: torch.dtype | None,
    earlier: Sequence[Tensor],
    known: int,
) -> Tensor:
    """`routed_read`; the first `known` of the sources have been read in a group, unless `earlier` is empty."""
    with full_precision(sources[0]):
        own, older = _still_to_read(sources, earlier, known)
        return mixture(own, query, key_norm, eps, dim, dtype=dtype or sources[0].dtype, older=older)


@_example(_like_state)
def grouped_delta_read(
    h: Tensor,
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm: Tensor,
    eps: float,
    dim: int,
    earlier: Sequence[Tensor],
    known: int,
) -> Tensor:
    """`delta_read`; the first `known` of the sources have been read in a group, unless `earlier` is empty."""
    with full_precision(h):
        own, older = _still_to_read(sources, earlier, known)
        return mixture(own, query, key_norm, eps, dim, dtype=h.dtype, onto=h, older=older)


def kept(h: Tensor) -> Tensor:
    """`h`, which a compiled inference writes to memory: else every read adds it up anew from the updates since.

    In training it would be kept for the backward.
    """
    return h if h.requires_grad else stored(h)


def single_read(h: Tensor, source: Tensor) -> Tensor:
    """h + v: a routed read over one source, whose weight is 1."""
    return (wide(h) + wide(source)).to(h.dtype)


def expand_source(vector: Tensor, h: Tensor, dim: int) -> Tensor:
    """A learned source [D], the same for every token."""
    return along(vector, h, dim).expand_as(h)


@_example(_like_state)
def scalar_gate(h: Tensor, read: Tensor, logit: Tensor) -> Tensor:
    """(1 - g) h + g read, g = sigmoid(logit [])."""
    with full_precision(h):
        return _blend(h, read, torch.sigmoid(wide(logit)))


@_example(_like_state)
def vector_gate(h: Tensor, read: Tensor, weight: Tensor, bias: Tensor, dim: int) -> Tensor:
    """(1 - g) h + g read, g = sigmoid(weight [D, D] h + bias [D])."""
    with full_precision(h):
        return _blend(h, read, channel_gate(h, weight, bias, dim))


@_example(_like_state)
def blend(plain: Tensor, value: Tensor, amount: Tensor) -> Tensor:
    """plain + amount (value - plain), amount []: the warm start, and Delta's alpha gate."""
    with full_precision(plain):
        return _blend(plain, value, wide(amount))


def _blend(plain: Tensor, value: Tensor, amount: Tensor) -> Tensor:
    start = wide(plain)
    return (start + amount * (wide(value) - start)).to(plain.dtype)


def channel_gate(h: Tensor, weight: Tensor, bias: Tensor, dim: int) -> Tensor:
    """g = sigmoid(W h + b), W [D, D], b [D]; in the dtype of statistics."""
    return torch.sigmoid(wide_linear(h, weight, dim) + along(wide(bias), h, dim))


@_example(_like_state)
def review_write(
    h: Tensor, u: Tensor, weight: Tensor, bias: Tensor, eps: float, dim: int, factor: float = 1.0
) -> Tensor:
    """h + factor r u, r = sigmoid(W [rms(h), rms(u)] + b), W [D, 2D], b [D]."""
    with full_precision(h):
        gate = review_gate(h, u, weight, bias, eps, dim)
        return (wide(h) + factor * gate * wide(u)).to(h.dtype)


def review_gate(h: Tensor, u: Tensor, weight: Tensor, bias: Tensor, eps: float, dim: int) -> Tensor:
    """r = sigmoid(W [rms(h), rms(u)] + b), W [D, 2D], b [D]; in the dtype of statistics.

    As c_h (W_h h) + c_u (W_u u) with c = 1 / rms per token: the matrices read h and u as they are, no normed copy is written.
    """
    d = weight.shape[0]
    from_h = inverse_rms(wide(h), eps, dim) * wide_linear(h, weight[:, :d], dim)
    from_u = inverse_rms(wide(u), eps, dim) * wide_linear(u, weight[:, d:], dim)
    return torch.sigmoid(from_h + from_u + along(wide(bias), h, dim))


@_example(_like_state)
def highway_write(h: Tensor, u: Tensor, weight: Tensor, bias: Tensor, dim: int, factor: float = 1.0) -> Tensor:
    """h + factor g u, g = sigmoid(W h + b), W [D, D], b [D]."""
    with full_precision(h):
        gate = channel_gate(h, weight, bias, dim)
        return (wide(h) + factor * gate * wide(u)).to(h.dtype)


@_example(_like_state)
def convex_highway_write(h: Tensor, u: Tensor, weight: Tensor, bias: Tensor, dim: int) -> Tensor:
    """(1 - g) h + g u, g = sigmoid(W h + b), W [D, D], b [D]."""
    with full_precision(h):
        return _blend(h, u, channel_gate(h, weight, bias, dim))


@_example(_like_state)
def scaled_write(h: Tensor, u: Tensor, factor: float, loops: int = 1) -> Tensor:
    """h + factor / loops u; `loops`: how often the body that this write stands in runs."""
    return scaled_sum(h, u, factor / loops).to(h.dtype)


@_example(_like_state)
def learned_scaled_write(h: Tensor, u: Tensor, lam: Tensor, divisor: float, loops: int = 1) -> Tensor:
    """h + lam / (divisor loops) u, lam []. The divisor is rounded to lam's dtype: lam = divisor loops means exactly 1."""
    with full_precision(h):
        factor = wide(lam) / wide(lam.new_full((), divisor * loops))
        return (wide(h) + factor * wide(u)).to(h.dtype)


def _like_pool(streams: Sequence[Tensor], *rest: object) -> Tensor:
    dtype = rest[3] if len(rest) > 3 and isinstance(rest[3], torch.dtype) else None
    return _like(streams[0], dtype=dtype)


@_example(_like_pool)
def pool(streams: Sequence[Tensor], w_alpha: Tensor, eps: float, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """sum_i p_i s_i, p = softmax_i(w_alpha . rms(s_i) / sqrt(D)), in `dtype`, else in that of the first stream."""
    with full_precision(streams[0]):
        return gating.pooled(streams, w_alpha, eps, dim, dtype or streams[0].dtype)


def _like_streams(streams: Sequence[Tensor], *rest: object) -> list[Tensor]:
    dtype = rest[5] if len(rest) > 5 and isinstance(rest[5], torch.dtype) else streams[0].dtype
    return [_like(stream, dtype=dtype) for stream in streams]


@_example(_like_streams)
def independent_mix(
    streams: Sequence[Tensor],
    u: Tensor,
    w_beta: Tensor,
    b_beta: Tensor,
    eps: float,
    dim: int,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """s_i <- (1 - b_i) s_i + b_i u, b_i = sigmoid(w_beta . rms(s_i) / sqrt(D) + b_beta_i). Dtype as in `pool`."""
    with full_precision(u):
        gates = gating.independent(streams, w_beta, b_beta, eps, dim)
        return gating.mixed(streams, u, gates, dtype or streams[0].dtype)


@_example(_like_streams)
def competitive_mix(
    streams: Sequence[Tensor],
    u: Tensor,
    w_beta: Tensor,
    forget: Tensor,
    eps: float,
    dim: int,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """s_i <- (1 - b_i) s_i + b_i u, b = softmax([forget, w_beta . rms(s_1) / sqrt(D), ..]) without its first entry.

    Dtype as in `pool`.
    """
    with full_precision(u):
        gates = gating.competitive(streams, w_beta, forget, eps, dim)
        return gating.mixed(streams, u, gates, dtype or streams[0].dtype)


def pick(values: Sequence[Tensor], index: int) -> Tensor:
    """One of several results."""
    return values[index]


_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": torch.mul,
    "div": torch.div,
    "mm": torch.mm,
    "bmm": torch.bmm,
}


def product(op: str, a: Tensor, b: Tensor) -> Tensor:
    """The product inside a fused multiply-add: "mul" or "div" elementwise, "mm" or "bmm" as matrices."""
    return _PRODUCTS[op](a, b)


def add(values: Sequence[Tensor]) -> Tensor:
    """The sum of several terms."""
    return reduce(torch.add, values)


def accumulate(total: Tensor, u: Tensor, like: Tensor) -> Tensor:
    """total + u, no narrower than `like`: a sum of narrow updates is kept in the dtype of their stream."""
    dtype = torch.promote_types(torch.promote_types(total.dtype, u.dtype), like.dtype)
    return total.to(dtype) + u.to(dtype)


def subtract(a: Tensor, b: Tensor) -> Tensor:
    """a - b."""
    return a - b


def scale(x: Tensor, factor: Scalar) -> Tensor:
    """factor x, in the dtype of `x`."""
    return (x * factor).to(x.dtype)


def divide(x: Tensor, divisor: Scalar) -> Tensor:
    """x / divisor, in the dtype of `x`."""
    return (x / divisor).to(x.dtype)


def expand_like(x: Tensor, like: Tensor) -> Tensor:
    """`x` broadcast to the shape of `like`."""
    return x.expand_as(like)


def zeros_like(x: Tensor) -> Tensor:
    """Zeros of the shape and dtype of `x`."""
    return torch.zeros_like(x)


def mask_ones(x: Tensor) -> Tensor:
    """What a dropout turns into its mask for `x`: ones in the dtype of statistics, so that the mask's scale is not rounded."""
    return torch.ones_like(wide(x))


def masked(x: Tensor, mask: Tensor) -> Tensor:
    """`x` behind a dropout whose mask is known."""
    return (x * mask).to(x.dtype)


def reshape_like(x: Tensor, like: Tensor) -> Tensor:
    """`x` in the shape of `like` (the same number of elements)."""
    return x.reshape(like.shape)


def permute(x: Tensor, order: Sequence[int]) -> Tensor:
    """`x` with its axes in another order."""
    return x.permute(*order)


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype."""
    return x.to(dtype)
