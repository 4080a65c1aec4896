"""Matrix products with a learned weight whose results stay in the dtype of statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from resfx.passes.statistics import wide

_HALVES = (torch.float16, torch.bfloat16)


def wide_linear(x: Tensor, weight: Tensor, dim: int) -> Tensor:
    """W x along axis `dim` (a 1x1 convolution where that is the channel axis), W [out, in]; in the dtype of statistics.

    On a GPU half-precision operands go into the product as they are, which adds up in float32 and gives float32: no wide copy is written.
    """
    if dim not in (-1, x.dim() - 1):
        return wide_linear(x.movedim(dim, -1), weight, -1).movedim(-1, dim)
    if x.dtype == weight.dtype and x.dtype in _HALVES and widens_products(x) and not torch.compiler.is_exporting():
        product: Tensor = _WideProduct.apply(x, weight)
        return product
    return F.linear(wide(x), wide(weight))


def widens_products(x: Tensor) -> bool:
    """Whether torch's product takes a result dtype where `x` lives."""
    return x.device.type == "cuda"


class _WideProduct(torch.autograd.Function):
    """x W^T, [.., in] and [out, in] in half precision to [.., out] in float32. Its gradients are the products a linear layer's would be."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return torch.mm(rows, weight.t(), out_dtype=torch.float32).reshape(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        narrow = g.to(x.dtype)
        rows = x.reshape(-1, x.shape[-1])
        return narrow @ weight, narrow.reshape(-1, weight.shape[0]).t() @ rows
