"""A leaf that reads nothing but the sizes of an argument is still called with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import resfx

D = 8


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, D)

    def forward(self, like: Tensor) -> Tensor:
        places: Tensor = self.table(torch.arange(like.shape[1]).expand(like.shape[0], -1))
        return places


class Encoder(nn.Module):
    """Hands its positions a slice of which only the sizes count, as mBART does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions, self.mlp = nn.Linear(D, D), Positions(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.positions(x[:, :, -1] * 2)
        return x + self.mlp(x)


def test_the_argument_is_kept() -> None:
    model = Encoder().eval()
    result = resfx.rewrite(model, resfx.Review(), (torch.randn(2, 5, D),), warm_start=True)
    for value in (torch.randn(2, 5, D), torch.randn(3, 7, D)):
        assert torch.allclose(result(value), model(value), atol=1e-6)
