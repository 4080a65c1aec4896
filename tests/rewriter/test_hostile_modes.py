"""Branches that a train-only operation changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import resfx


class Branch(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.f, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.f(x)
        if self.training and self.kind == "noise":
            y = y + 0.1 * torch.rand(y.shape)
        if self.training and self.kind == "depth":
            y = y * torch.empty(y.shape[0], 1, 1).bernoulli_(0.5) / 0.5
        if self.training and self.kind == "default":
            y = y * torch.empty(y.shape[0], 1, 1).bernoulli_()
        return x + y


@pytest.mark.parametrize("kind", ["noise", "depth", "default"])
def test_train_only_operations_on_the_branch(kind: str) -> None:
    model, x = Branch(kind), torch.randn(4, 5, 8)
    rewritten = resfx.rewrite(model, resfx.Standard(), (x,))
    for mode in (True, False):
        torch.manual_seed(0)
        expected = model.train(mode)(x)
        torch.manual_seed(0)
        assert torch.equal(rewritten.train(mode)(x), expected)
    assert len(rewritten.residual_map.sites) == 1
