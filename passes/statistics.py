"""What every form computes per token: in which dtype, along which axis, and the inverse root mean square.

Statistics are computed in float32 for half-precision inputs and otherwise in the input's own dtype, decided when the function runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor


def full_precision(x: Tensor) -> AbstractContextManager[object]:
    """No autocast inside. Entered only where autocast is on, so that a plain export stays free of autocast regions."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):  # torch knows no autocast for meta tensors
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype that statistics are computed in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def along(vector: Tensor, like: Tensor, dim: int) -> Tensor:
    """[D] shaped so that it broadcasts along axis `dim` of `like`."""
    if dim in (-1, like.dim() - 1):
        return vector
    shape = [1] * like.dim()
    shape[dim] = -1
    return vector.reshape(shape)


def inverse_rms(v: Tensor, eps: float, dim: int) -> Tensor:
    """1 / sqrt(mean(v^2) + eps) along axis `dim`, which stays as one entry."""
    return torch.rsqrt((v * v).mean(dim, keepdim=True) + eps)


def list_softmax(scores: Sequence[Tensor]) -> list[Tensor]:
    """softmax over the list, without a stack: a compiler would write that to memory, and take what is fused around it in two passes."""
    largest = reduce(torch.maximum, scores).detach()  # a shift changes nothing
    powers = [torch.exp(z - largest) for z in scores]
    total = reduce(torch.add, powers)
    return [power / total for power in powers]
