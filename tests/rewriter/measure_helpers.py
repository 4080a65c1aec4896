"""What the tests of `measure` share: a small model in every form, and norms by hand."""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import resfx

D, SITES = 12, 5


class Branch(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, 8), nn.Linear(8, D)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(F.gelu(self.fc1(self.norm(x)))))


class Net(nn.Module):
    """Pre-norm sites; the first update is added with a factor, the last one is the sum of two branches."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(dropout) for _ in range(SITES + 1))
        self.head = nn.LayerNorm(D)

    def updates(self, number: int, x: Tensor) -> Tensor:
        u = self.branches[number](x)
        return u + self.branches[SITES](x) if number == SITES - 1 else u

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.branches[0](x)
        for number in range(1, SITES - 1):
            x = x + self.branches[number](x)
        x = x + self.branches[SITES - 1](x) + self.branches[SITES](x)
        return self.head(x)


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


def seeded_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def seeded_input() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 4, D, dtype=torch.float64)


@functools.cache
def _rewritten(form: resfx.Form, warm: bool) -> resfx.Rewritten:
    return resfx.rewrite(seeded_net(), form, (torch.randn(2, 4, D, dtype=torch.float64),), warm_start=warm)


def rewritten(form: resfx.Form, warm: bool = False) -> resfx.Rewritten:
    """`net` in another form, with the new parameters at their start; each is captured once."""
    return copy.deepcopy(_rewritten(form, warm))


def perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("residual."):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def token_norm(value: Tensor) -> float:
    return float(value.detach().norm(dim=-1).square().mean().sqrt())
