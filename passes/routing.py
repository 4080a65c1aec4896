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


def mixture(sources: Sequence[Tensor], query: Tensor, key_norm: Tensor, eps: float, dim: int) -> Tensor:
    """sum_i a_i v_i over sources like the stream, in the dtype of statistics; `query` and `key_norm` are [D]."""
    key = wide(query) * wide(key_norm)
    if _needs_plain_ops([key, *sources]):
        return _mix(_Scores(sources, key, eps, dim))
    mixed: Tensor = _Mixture.apply(eps, dim, key, *sources)
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


def _mix(known: _Scores) -> Tensor:
    return reduce(torch.add, [a * v for a, v in zip(known.weights, known.values, strict=True)])


def _needs_plain_ops(tensors: Sequence[Tensor]) -> bool:
    """An exported graph holds no gradients of its own, and forward-mode derivatives are torch's."""
    if torch.compiler.is_exporting():
        return True
    if torch.compiler.is_compiling():
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)  # type: ignore[no-untyped-call]


class _Mixture(torch.autograd.Function):
    """sum_i a_i v_i; its backward is written in differentiable operations of the inputs, so second derivatives are right."""

    generate_vmap_rule = True

    @staticmethod
    def forward(eps: float, dim: int, key: Tensor, *sources: Tensor) -> Tensor:
        return _mix(_Scores(sources, key, eps, dim))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.eps, ctx.dim, *tensors = inputs
        ctx.save_for_backward(*tensors)

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
        return None, None, _per_feature(reduce(torch.add, to_key), dim), *to_sources


def _per_feature(x: Tensor, dim: int) -> Tensor:
    """The sum over every axis but `dim`: [D]."""
    axis = dim % x.dim()
    return x.sum([i for i in range(x.dim()) if i != axis])
