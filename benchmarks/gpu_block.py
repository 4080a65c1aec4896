"""Block attention residuals over the kernels of the package flash-attn-res, where it is installed: what others reach by hand."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import torch
from reference_net import ReferenceNet
from torch import Tensor, nn

FLASH = importlib.import_module("flash_attn_res") if find_spec("flash_attn_res") else None
EPS = 1e-6


class FlashBlock(ReferenceNet):
    """Sublayers read an attention over the sums of earlier blocks (all reads of a block in one kernel) and of their own block so far."""

    def __init__(self, sublayers: int, width: int, block_size: int) -> None:
        super().__init__(sublayers, width)
        self.block_size = block_size
        self.queries = nn.Parameter(torch.zeros(sublayers + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        blocks = [x]
        for start in range(0, len(self.sublayers), self.block_size):
            blocks.append(self._block(start, torch.stack(blocks)))
        final, _ = FLASH.phase_1_batched_attention_triton_op(torch.stack(blocks), self.queries[-1:], EPS)
        return final[0].to(x.dtype)

    def _block(self, start: int, earlier: Tensor) -> Tensor:
        own = self.sublayers[start : start + self.block_size]
        queries = self.queries[start : start + len(own)]
        reads, sums = FLASH.phase_1_batched_attention_triton_op(earlier, queries, EPS)
        total = own[0](reads[0].to(earlier.dtype))
        for k in range(1, len(own)):
            read = FLASH.phase_2_online_softmax_merge_triton_op(total, queries[k], reads[k], sums[k], EPS)
            total = total + own[k](read.to(earlier.dtype))
        return total
