"""What a form's function decides while it runs: its routing weights, its gates. `resfx.measure` asks here.

A function of `ops` that routes or gates has one entry in `PROBES`: the same arguments, the decision instead of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from resfx.passes import gating, ops, routing


@dataclass(frozen=True)
class Probe:
    """`weights`: one tensor per source, which sum to 1. `gates`: any number of tensors of values that scale an update or a read."""

    weights: tuple[Tensor, ...] = ()
    gates: tuple[Tensor, ...] = ()


def _delta_read(
    h: Tensor, sources: Sequence[Tensor], query: Tensor, key_norm: Tensor, eps: float, dim: int, *_: object
) -> Probe:
    return Probe(weights=routing.weights(sources, query, key_norm, eps, dim))


def _routed_read(sources: Sequence[Tensor], query: Tensor, key_norm: Tensor, eps: float, dim: int, *_: object) -> Probe:
    return Probe(weights=routing.weights(sources, query, key_norm, eps, dim))


def _pool(streams: Sequence[Tensor], w_alpha: Tensor, eps: float, dim: int, dtype: torch.dtype | None = None) -> Probe:
    return Probe(weights=gating.pool_weights(streams, w_alpha, eps, dim))


def _independent_mix(
    streams: Sequence[Tensor], u: Tensor, w_beta: Tensor, b_beta: Tensor, eps: float, dim: int, *_: object
) -> Probe:
    return Probe(gates=tuple(gating.independent(streams, w_beta, b_beta, eps, dim)))


def _competitive_mix(
    streams: Sequence[Tensor], u: Tensor, w_beta: Tensor, forget: Tensor, eps: float, dim: int, *_: object
) -> Probe:
    return Probe(gates=tuple(gating.competitive(streams, w_beta, forget, eps, dim)))


def _review_write(
    h: Tensor, u: Tensor, weight: Tensor, bias: Tensor, eps: float, dim: int, factor: float = 1.0
) -> Probe:
    return Probe(gates=(factor * ops.review_gate(h, u, weight, bias, eps, dim),))


def _highway_write(h: Tensor, u: Tensor, weight: Tensor, bias: Tensor, dim: int, factor: float = 1.0) -> Probe:
    return Probe(gates=(factor * ops.channel_gate(h, weight, bias, dim),))


def _vector_gate(h: Tensor, read: Tensor, weight: Tensor, bias: Tensor, dim: int) -> Probe:
    return Probe(gates=(ops.channel_gate(h, weight, bias, dim),))


def _scalar_gate(h: Tensor, read: Tensor, logit: Tensor) -> Probe:
    return Probe(gates=(torch.sigmoid(logit.double()),))


def _blend(plain: Tensor, value: Tensor, amount: Tensor) -> Probe:
    return Probe(gates=(amount,))


PROBES: Mapping[Any, Callable[..., Probe]] = {
    ops.delta_read: _delta_read,
    ops.grouped_delta_read: _delta_read,
    ops.routed_read: _routed_read,
    ops.grouped_routed_read: _routed_read,
    ops.pool: _pool,
    ops.independent_mix: _independent_mix,
    ops.competitive_mix: _competitive_mix,
    ops.review_write: _review_write,
    ops.highway_write: _highway_write,
    ops.convex_highway_write: _highway_write,
    ops.vector_gate: _vector_gate,
    ops.scalar_gate: _scalar_gate,
    ops.blend: _blend,
}


def probe(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Probe | None:
    """The decision of one call of a function of `ops`; None where it decides nothing. Without gradients or autocast."""
    ask = PROBES.get(function)
    if ask is None:
        return None
    tensors = [value for value in args if isinstance(value, Tensor)]
    kind = tensors[0].device.type if tensors else "cpu"
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        return ask(*args, **kwargs)
