"""The attention over sources that Delta and Attention residuals read, with its gradients derived by hand.

Per token, with v_i the sources and k = query * key_norm:

    c_i = 1 / sqrt(mean(v_i^2) + eps),  z_i = c_i (k . v_i),  a = softmax(z),  r = sum_i a_i v_i

and for a gradient g of r:

    p_i = g . v_i,  m = sum_j a_j p_j,  dz_i = a_i (p_i - m),
    dv_i = a_i g + dz_i c_i (k - z_i c_i v_i / D),  dk = sum over tokens and i of dz_i c_i v_i.

A part of the sources may have been read before, for several readers at once (`group_read`): as V = sum_j exp(z_j - L) v_j,
s = sum_j exp(z_j - L) and L, which merge as one more source would that weighs a_0 = exp(L) / sum. L cancels in the result, so that it has
no gradient; dV = a_0 g, ds = -a_0 m.

The sources are never stacked, and nothing but the inputs is saved: c, z and a are scalars per token that the backward takes anew in the
pass over v_i that p_i needs anyway (a compiler keeps the forward's, which are the same expressions).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from resfx.passes.statistics import along, inverse_rms, list_softmax, wide
from resfx.passes.stored import compiling, stored, stored_to_train


class Older(NamedTuple):
    """What one reader knows of the sources that were read before: its key [D]; V like the stream; s and L one per token, wide."""

    key: Tensor
    value: Tensor
    total: Tensor
    shift: Tensor


def weights(sources: Sequence[Tensor], query: Tensor, key_norm: Tensor, eps: float, dim: int) -> tuple[Tensor, ...]:
    """softmax_i(query . (rms(v_i) * key_norm)), one weight per token and source; sources like the stream, vectors [D]."""
    return _Scores(sources, wide(query) * wide(key_norm), eps, dim, None).weights


def mixture(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm: Tensor,
    eps: float,
    dim: int,
    *,
    dtype: torch.dtype,
    onto: Tensor | None = None,
    older: Older | None = None,
) -> Tensor:
    """onto + sum_i a_i v_i, a = softmax_i(query . (rms(v_i) * key_norm)), rounded once, to `dtype`.

    Sources and `onto` are like the stream, `query` and `key_norm` are [D]. `older`: further sources, which have been read.
    """
    key = stored_to_train(wide(query) * wide(key_norm)) if older is None else older.key
    tensors = [*(() if older is None else older[1:]), *([] if onto is None else [onto]), *sources]
    if _needs_plain_ops([key, *tensors]):
        return _mix(_Scores(sources, key, eps, dim, older), onto, dtype)
    mixed: Tensor = _Mixture.apply(eps, dim, dtype, (older is not None, onto is not None), key, *distinct(tensors))
    # Without a state in it, a compiler would take it anew in the backward, wide, and store that.
    return stored(mixed) if onto is None else mixed


class _Scores:
    """What a read knows of each source: itself in the wide dtype, 1 / rms, score and weight."""

    def __init__(self, sources: Sequence[Tensor], key: Tensor, eps: float, dim: int, older: Older | None) -> None:
        self.values = [wide(source) for source in sources]
        self.keys = [along(key, v, dim) for v in self.values]
        self.inverse = [inverse_rms(v, eps, dim) for v in self.values]
        products = [(v * k).sum(dim, keepdim=True) for v, k in zip(self.values, self.keys, strict=True)]
        self.scores = [c * product for c, product in zip(self.inverse, products, strict=True)]
        if older is None:
            self.weights = _softmax(self.scores)
            return
        self.older = wide(older.value)
        shift = reduce(torch.maximum, self.scores, older.shift)
        first, *others = [(z - shift).exp() for z in (older.shift, *self.scores)]
        total = reduce(torch.add, others, first * older.total)
        self.older_weight = first / total
        self.weights = tuple(part / total for part in others)

    def terms(self) -> list[Tensor]:
        """a_i v_i, in order of age."""
        own = [a * v for a, v in zip(self.weights, self.values, strict=True)]
        return [self.older_weight * self.older, *own] if hasattr(self, "older") else own


def _softmax(scores: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Over the list; one node less per source where no compiler takes it."""
    if not compiling():
        return torch.stack(list(scores)).softmax(0).unbind(0)
    return tuple(list_softmax(scores))


def _mix(known: _Scores, onto: Tensor | None, dtype: torch.dtype) -> Tensor:
    mixed = reduce(torch.add, known.terms())
    return (mixed if onto is None else wide(onto) + mixed).to(dtype)


def _needs_plain_ops(tensors: Sequence[Tensor]) -> bool:
    """Without a backward there is none to derive, an exported graph holds none, and forward-mode derivatives are torch's."""
    if not needs_gradients(tensors):
        return True
    if torch.compiler.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    return has_tangent(tensors)


def needs_gradients(tensors: Sequence[Tensor]) -> bool:
    """Whether there will be a backward."""
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def has_tangent(tensors: Sequence[Tensor]) -> bool:
    """Whether forward-mode derivatives are being taken of one of them."""
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)  # type: ignore[no-untyped-call]


def distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views in place of repeated tensors (the first state is a source too): torch.compile takes each argument once."""
    found: list[Tensor] = []
    for tensor in tensors:
        found.append(tensor.view_as(tensor) if any(tensor is other for other in found) else tensor)
    return found


def _parts(
    has: tuple[bool, bool], key: Tensor, tensors: Sequence[Tensor]
) -> tuple[Older | None, Tensor | None, Sequence[Tensor]]:
    """What `mixture` has put together: the older sources, the state, the sources."""
    has_older, has_state = has
    older = Older(key, *tensors[:3]) if has_older else None
    rest = tensors[3:] if has_older else tensors
    return older, rest[0] if has_state else None, rest[1:] if has_state else rest


class _Mixture(torch.autograd.Function):
    """`mixture`; its backward is written in differentiable operations of the inputs, so second derivatives are right.

    A narrow `g` is never widened as a whole: each product promotes it. A widened copy with so many readers would be stored by a compiler.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        eps: float, dim: int, dtype: torch.dtype, has: tuple[bool, bool], key: Tensor, *tensors: Tensor
    ) -> Tensor:
        older, onto, sources = _parts(has, key, tensors)
        if older is not None and onto is None and not sources:
            return older.value.to(dtype).view_as(older.value)  # its weight is 1
        return _mix(_Scores(sources, key, eps, dim, older), onto, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.eps, ctx.dim, _, (ctx.has_older, has_state), key, *tensors = inputs
        older, state, sources = _parts((ctx.has_older, has_state), key, tensors)
        ctx.state_dtype = None if state is None else state.dtype
        ctx.save_for_backward(key, *(() if older is None else older[1:]), *sources)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        key, *tensors = ctx.saved_tensors
        older, _, sources = _parts((ctx.has_older, False), key, tensors)
        dim, size = ctx.dim, key.shape[0]
        known = _Scores(sources, key, ctx.eps, dim, older)
        inner = [(g * v).sum(dim, keepdim=True) for v in known.values]
        parts = [a * p for a, p in zip(known.weights, inner, strict=True)]
        if older is not None:
            parts.insert(0, known.older_weight * (g * known.older).sum(dim, keepdim=True))
        mean = reduce(torch.add, parts)
        to_older: list[Tensor | None] = []
        if older is not None:
            to_older = [(known.older_weight * g).to(older.value.dtype), -known.older_weight * mean, None]
        to_key, to_sources = [], []
        rows = zip(sources, known.values, known.keys, known.inverse, known.scores, known.weights, inner, strict=True)
        for source, v, k, c, z, a, p in rows:
            slope = a * (p - mean) * c
            to_sources.append((a * g + slope * k - (slope * z * c / size) * v).to(source.dtype))
            to_key.append(_per_feature(slope * v, dim))
        to_state = [] if ctx.state_dtype is None else [g.to(ctx.state_dtype)]
        for_key = reduce(torch.add, to_key) if to_key else None
        return None, None, None, None, for_key, *to_older, *to_state, *to_sources


def _per_feature(x: Tensor, dim: int) -> Tensor:
    """The sum over every axis but `dim`: [D]."""
    axis = dim % x.dim()
    return x.sum([i for i in range(x.dim()) if i != axis])
