"""A leaf that reads nothing but the sizes of an argument is still called with it."""

from __future__ import annotations

import pytest
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


class Places(nn.Module):
    """Learned positions, looked up by a tensor that is made of a size alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        x = x + self.first(x)
        return x + self.second(x)


@pytest.mark.parametrize("frontend", ["export", "fx"])
def test_a_tensor_made_of_a_size(frontend: str) -> None:
    model, ids = Places().eval(), torch.randint(0, 50, (2, 7))
    assert [len(stream.sites) for stream in resfx.find(model, (ids,), frontend=frontend).streams] == [2]
    rewritten = resfx.rewrite(model, resfx.DeltaAttention(), (ids,), frontend=frontend, warm_start=True)
    longer = torch.randint(0, 50, (3, 11))
    torch.testing.assert_close(rewritten(longer), model(longer))
