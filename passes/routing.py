"""The attention over sources that Delta and Attention residuals read, with its gradients derived by hand.

Per token, with v_i the sources and k = query * key_norm:

    c_i = 1 / sqrt(mean(v_i^2) + eps),  z_i = c_i (k . v_i),  a = softmax(z),  r = sum_i a_i v_i

and for a gradient g of r:

    p_i = g . v_i,  dz_i = a_i (p_i - sum_j a_j p_j),
    dv_i = a_i g + dz_i c_i (k - z_i c_i v_i / D),  dk = sum over tokens and i of dz_i c_i v_i.

The sources are never stacked, and nothing but the inputs is saved: c, z and a are scalars per token that the backward takes anew in the
pass over v_i that p_i needs anyway (a compiler keeps the forward's, which are the same expressions).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from resfx.passes.statistics import along, inverse_rms, wide


def weights(sources: Sequence[Tensor], query: Tensor, key_norm: Tensor, eps: float, dim: int) -> tuple[Tensor, ...]:
    """softmax_i(query . (rms(v_i) * key_norm)), one weight per token and source; sources like the stream, vectors [D]."""
    return _Scores(sources, wide(query) * wide(key_norm), eps, dim).weights


def mixture(
    sources: Sequence[Tensor],
    query: Tensor,
    key_norm: Tensor,
    eps: float,
    dim: int,
    *,
    dtype: torch.dtype,
    onto: Tensor | None = None,
) -> Tensor:
    """onto + sum_i a_i v_i, a = softmax_i(query . (rms(v_i) * key_norm)), rounded once, to `dtype`.

    Sources and `onto` are like the stream, `query` and `key_norm` are [D].
    """
    key = wide(query) * wide(key_norm)
    tensors = [*sources] if onto is None else [onto, *sources]
    if _needs_plain_ops([key, *tensors]):
        return _mix(_Scores(sources, key, eps, dim), onto, dtype)
    mixed: Tensor = _Mixture.apply(eps, dim, dtype, onto is not None, key, *_distinct(tensors))
    return mixed


class _Scores:
    """What a read knows of each source: itself in the wide dtype, 1 / rms, score and weight."""

    def __init__(self, sources: Sequence[Tensor], key: Tensor, eps: float, dim: int) -> None:
        self.values = [wide(source) for source in sources]
        self.keys = [along(key, v, dim) for v in self.values]
        self.inverse = [inverse_rms(v, eps, dim) for v in self.values]
        products = [(v * k).sum(dim, keepdim=True) for v, k in zip(self.values, self.keys, strict=True)]
        self.scores = [c * product for c, product in zip(self.inverse, products, strict=True)]
        self.weights = torch.stack(self.scores).softmax(0).unbind(0)


def _mix(known: _Scores, onto: Tensor | None, dtype: torch.dtype) -> Tensor:
    terms = [a * v for a, v in zip(known.weights, known.values, strict=True)]
    mixed = reduce(torch.add, terms)
    return (mixed if onto is None else wide(onto) + mixed).to(dtype)


def _needs_plain_ops(tensors: Sequence[Tensor]) -> bool:
    """Without a backward there is none to derive, an exported graph holds none, and forward-mode derivatives are torch's."""
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
        return True
    if torch.compiler.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)  # type: ignore[no-untyped-call]


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views in place of repeated tensors (the first state is a source too): torch.compile takes each argument once."""
    found: list[Tensor] = []
    for tensor in tensors:
        found.append(tensor.view_as(tensor) if any(tensor is other for other in found) else tensor)
    return found


class _Mixture(torch.autograd.Function):
    """`mixture`; its backward is written in differentiable operations of the inputs, so second derivatives are right.

    A narrow `g` is never widened as a whole: each product promotes it. A widened copy with so many readers would be stored by a compiler.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(eps: float, dim: int, dtype: torch.dtype, has_state: bool, key: Tensor, *tensors: Tensor) -> Tensor:
        sources = tensors[1:] if has_state else tensors
        return _mix(_Scores(sources, key, eps, dim), tensors[0] if has_state else None, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.eps, ctx.dim, ctx.has_state = inputs[0], inputs[1], inputs[3]
        tensors = inputs[5:]
        ctx.state_dtype = tensors[0].dtype
        ctx.save_for_backward(inputs[4], *(tensors[1:] if ctx.has_state else tensors))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        key, *sources = ctx.saved_tensors
        dim, size = ctx.dim, key.shape[0]
        known = _Scores(sources, key, ctx.eps, dim)
        inner = [(g * v).sum(dim, keepdim=True) for v in known.values]
        mean = reduce(torch.add, [a * p for a, p in zip(known.weights, inner, strict=True)])
        to_key, to_sources = [], []
        rows = zip(sources, known.values, known.keys, known.inverse, known.scores, known.weights, inner, strict=True)
        for source, v, k, c, z, a, p in rows:
            slope = a * (p - mean) * c
            to_sources.append((a * g + slope * k - (slope * z * c / size) * v).to(source.dtype))
            to_key.append(slope * v)
        to_state = [g.to(ctx.state_dtype)] if ctx.has_state else []
        return None, None, None, None, _per_feature(reduce(torch.add, to_key), dim), *to_state, *to_sources


def _per_feature(x: Tensor, dim: int) -> Tensor:
    """The sum over every axis but `dim`: [D]."""
    axis = dim % x.dim()
    return x.sum([i for i in range(x.dim()) if i != axis])
