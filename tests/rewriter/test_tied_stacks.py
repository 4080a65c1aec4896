"""N and L: tied repeats are found by the identity of their parameters, in both frontends."""

from __future__ import annotations

import math

import pytest
import torch
from loop_models import Block, D, Sublayer, example, made
from torch import Tensor, nn

import resfx


class Albert(nn.Module):
    """One post-norm block, run again and again."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers, self.f, self.g = layers, Sublayer(), Sublayer()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.layers):
            x = self.n1(x + self.f(x))
            x = self.n2(x + self.g(x))
        return x


class Universal(nn.Module):
    """A block with an embedding of the step."""

    def __init__(self, steps: int = 4) -> None:
        super().__init__()
        self.block, self.step, self.out = Block(), nn.Embedding(steps, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for number in range(self.step.num_embeddings):
            x = self.block(x + self.step.weight[number])
        return self.out(x)


class Containers(nn.Module):
    """One block, reached through a list, a dict and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.list = nn.ModuleList([self.block, Block()])
        self.dict = nn.ModuleDict({"again": self.block})

    def forward(self, x: Tensor) -> Tensor:
        return self.dict["again"](self.list[1](self.list[0](self.block(x))))


class Assigned(nn.Module):
    """Two modules whose parameters were assigned to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Sublayer(), Sublayer(), Sublayer()
        for name in ("ln", "a", "b"):
            getattr(self.third, name).weight = getattr(self.first, name).weight
            getattr(self.third, name).bias = getattr(self.first, name).bias

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        x = x + self.second(x)
        return x + self.third(x)


class HalfTied(nn.Module):
    """The weight is shared, the bias is not: two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.first(x))
        return x + torch.tanh(self.second(x))


# (model, executions of every site's branch, number of its branch)
STACKS: list[tuple[type[nn.Module], list[int], list[int]]] = [
    (Albert, [3] * 6, [0, 1] * 3),
    (Universal, [4] * 8, [0, 1] * 4),
    (Containers, [3, 3, 3, 3, 1, 1, 3, 3], [0, 1, 0, 1, 2, 3, 0, 1]),
    (Assigned, [2, 1, 2], [0, 1, 0]),
    (HalfTied, [1, 1], [0, 1]),
]


@pytest.mark.parametrize("frontend", ["export", "fx"])
@pytest.mark.parametrize(("kind", "repeats", "branches"), STACKS)
def test_n_and_l_of_tied_stacks(kind: type[nn.Module], repeats: list[int], branches: list[int], frontend: str) -> None:
    found = resfx.find(made(kind), (example(),), frontend=frontend)
    (stream,) = found.streams
    assert [site.repeats for site in stream.sites] == repeats
    assert [site.branch_id for site in stream.sites] == branches
    assert stream.distinct_branches == len(set(branches))
    tied = {(loop.count, loop.branches) for loop in found.loops}
    assert tied == {
        (n, len({b for b, r in zip(branches, repeats, strict=True) if r == n})) for n in set(repeats) if n > 1
    }


@pytest.mark.parametrize("frontend", ["export", "fx"])
def test_e_follows_n_and_l(frontend: str) -> None:
    """`Containers`: the tied block has N = 3, the other one N = 1, and there are L = 4 branches."""
    model, x = made(Containers), example()
    y, width = x, math.sqrt(4)
    for block, n in ((model.block, 3), (model.block, 3), (model.list[1], 1), (model.block, 3)):
        for sub in (block.f, block.g):
            y = y + 0.9 / (n * width) * sub(y)
    rewritten = resfx.rewrite(model, resfx.ScaledLoop(lam=0.9), (x,), frontend=frontend)
    torch.testing.assert_close(rewritten(x), y, rtol=1e-12, atol=1e-12)
