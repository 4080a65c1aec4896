"""Small models for the export tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm residual MLP with dropout."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class TinyGPT(nn.Module):
    """Causal language model, tied head: tokens (B, T), labels (B, T) or None, int64 -> logits (B, T, 1000), loss ()."""

    def __init__(self, width: int = 16, vocabulary: int = 1000) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(64, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mlp = Block(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        rows, length = tokens.shape
        h = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
        q, k, v = self.qkv(h).reshape(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + mixed.transpose(1, 2).reshape(rows, length, -1)
        logits = self.head(self.mlp(h))
        return logits, None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass
class Result:
    states: Tensor
    cache: Tensor | None
    pair: tuple[Tensor, Tensor]
    steps: int


class Structured(nn.Module):
    """Nested keyword inputs, constants, an in-place add on an input, a step counter, a dataclass of many kinds out."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(()))

    def forward(
        self,
        x: Tensor,
        *,
        extra: dict[str, list[Tensor]],
        mask: Tensor | None = None,
        double: bool = False,
        times: int = 1,
    ) -> Result:
        self.steps += 1
        shift = extra["shifts"][0]
        shift.add_(1)
        h = self.linear(x) * times + shift
        if double:
            h = h * 2
        return Result(states=h, cache=mask, pair=(x, h), steps=times)


class BiasedAttention(nn.Module):
    """Attention with a learned bias by distance, as in T5: (B, T, 8) -> (B, T, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.bias = nn.Embedding(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (part.view(rows, length, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        places = torch.arange(length)
        bias = self.bias((places[None] - places[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)[None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return mixed.transpose(1, 2).reshape(rows, length, width)


class FixedBatch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled = x * 2
        return doubled.reshape(4, -1) + torch.arange(4)[:, None]


class OneRowIsSpecial(nn.Module):
    """No one graph serves one row and more: (B, D) -> (B, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3 if x.shape[0] == 1 else x * 2


class BranchOnData(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return x * 2
