"""What MultiGate computes of its streams: gates, the gated mix, the weights of the pool and the pool.

Streams and u are like the stream, vectors are [D]; scalars per token keep axis `dim` as one entry and are in the dtype of statistics.

Products promote a narrow stream where they need it: a widened copy with several readers would be stored by a compiler. Streams are
stored, in their own dtype: one fused pass of a write reads each of them once and writes each once, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from resfx.passes.statistics import along, inverse_rms, list_softmax, wide
from resfx.passes.stored import stored, stored_to_train


def pooled(streams: Sequence[Tensor], w_alpha: Tensor, eps: float, dim: int, dtype: torch.dtype) -> Tensor:
    """sum_i p_i s_i, in `dtype`."""
    weights = pool_weights(streams, w_alpha, eps, dim)
    total = reduce(torch.add, [p * s for p, s in zip(weights, streams, strict=True)])
    return stored_to_train(total.to(dtype))


def pool_weights(streams: Sequence[Tensor], w_alpha: Tensor, eps: float, dim: int) -> tuple[Tensor, ...]:
    """softmax_i(w_alpha . rms(s_i) / sqrt(D)), one weight per token and stream."""
    return tuple(list_softmax(_logits(streams, w_alpha, eps, dim)))


def independent(streams: Sequence[Tensor], w_beta: Tensor, b_beta: Tensor, eps: float, dim: int) -> list[Tensor]:
    """b_i = sigmoid(w_beta . rms(s_i) / sqrt(D) + b_beta_i), one per token and stream."""
    logits = _logits(streams, w_beta, eps, dim)
    return [torch.sigmoid(z + b) for z, b in zip(logits, wide(b_beta).unbind(0), strict=True)]


def competitive(streams: Sequence[Tensor], w_beta: Tensor, forget: Tensor, eps: float, dim: int) -> list[Tensor]:
    """softmax([forget, w_beta . rms(s_1) / sqrt(D), ..]) without its first entry."""
    logits = _logits(streams, w_beta, eps, dim)
    first = wide(forget).reshape([1] * logits[0].dim()).expand_as(logits[0])
    return list_softmax([first, *logits])[1:]


def mixed(streams: Sequence[Tensor], u: Tensor, gates: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """(1 - b_i) s_i + b_i u, in `dtype`."""
    return [stored(((1 - b) * s + b * u).to(dtype)) for s, b in zip(streams, gates, strict=True)]


def _logits(streams: Sequence[Tensor], w: Tensor, eps: float, dim: int) -> list[Tensor]:
    """w . rms(s_i) / sqrt(D) per token and stream."""
    vector = along(wide(w) / w.shape[0] ** 0.5, streams[0], dim)
    return [inverse_rms(wide(s), eps, dim) * (s * vector).sum(dim, keepdim=True) for s in streams]
