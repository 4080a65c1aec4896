"""Rarer spellings of the add: a site each, in the middle of one stream, and what a rewrite keeps of the skip's factor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import resfx

SPELLINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "lerp": lambda x, f: torch.lerp(x, f, 0.3),
    "einsum": lambda x, f: torch.einsum("nbsd->bsd", torch.stack([x, f])),
    "cat of unsqueezed": lambda x, f: torch.cat([x[None], f[None]]).sum(0),
    "cat of features": lambda x, f: torch.cat([x, f], -1).view(*x.shape[:-1], 2, 8).sum(-2),
    "cat of features, unflatten": lambda x, f: torch.cat([x, f], -1).unflatten(-1, (2, 8)).sum(2),
    "cat of batches": lambda x, f: torch.cat([x, f]).reshape(2, *x.shape).sum(0),
    "addcdiv": lambda x, f: torch.addcdiv(x, f, f.exp() + 1),
    "addcdiv, value": lambda x, f: torch.addcdiv(x, f, x.exp() + 1, value=-2.0),
    "stack mean": lambda x, f: torch.stack([x, f]).mean(0),
}


class Net(nn.Module):
    def __init__(self, how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        x = self.how(x, self.b(x))
        return x + self.c(x)


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_stream_of_three_sites(name: str) -> None:
    model, x = Net(SPELLINGS[name]).eval(), torch.randn(2, 5, 8)
    assert [len(stream.sites) for stream in resfx.find(model, (x,)).streams] == [3]
    warm = resfx.rewrite(model, resfx.Review(), (x,), warm_start=True)
    assert torch.allclose(warm(x), model(x), atol=1e-6)
