"""The streams of a write of MultiGate, computed once more for the next write in place of being stored between the two."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from resfx.passes import group_kernels, ops
from resfx.passes.routing import needs_gradients
from resfx.passes.stored import compiling, not_before

_MIXES: dict[str, Callable[..., list[Tensor]]] = {
    "independent": ops.independent_mix,
    "competitive": ops.competitive_mix,
}


def streams_again(
    streams: Sequence[Tensor],
    gate: str,
    older: Sequence[Tensor],
    u: Tensor,
    w_beta: Tensor,
    other: Tensor,
    eps: float,
    dim: int,
    next_u: Tensor,
) -> list[Tensor]:
    """`streams`, for the write of `next_u`: what the mix with such a `gate` made of the `older` ones and its parameters.

    An inference that is compiled for a GPU makes them again there: two writes then read the streams twice and write them once.
    """
    on_a_gpu = compiling() and group_kernels.runs_on(next_u)
    if not on_a_gpu or needs_gradients([*streams, *older, u, w_beta, other, next_u]):
        return list(streams)
    held = [not_before(stream, next_u) for stream in older]
    return _MIXES[gate](held, u, w_beta, other, eps, dim, streams[0].dtype)
