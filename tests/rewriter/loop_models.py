"""The layers that the tests of loops stack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

D, LAM = 8, 0.5


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.ln(x))))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Sublayer(), Sublayer()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x + self.g(x)


def example() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 5, D, dtype=torch.float64)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double().eval()
