"""Submodules that change the list or dict they are given: their modules are kept, they themselves are opened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import resfx

D = 8


class Collect(nn.Module):
    """Appends what its layers make to the caller's list, as VoVNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        for layer in self.layers:
            kept.append(layer(kept[-1]))
        return torch.cat(kept, -1)


class Take(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        return self.layer(x + kept.pop())


class Record(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor, seen: dict[str, Tensor]) -> Tensor:
        seen["first"] = self.layer(seen["first"])
        seen["second"] = self.layer(x)
        return seen["second"].relu()


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.collect, self.take, self.record = Collect(), Take(), Record()
        self.out = nn.Linear(3 * D, D)

    def branch(self, x: Tensor) -> Tensor:
        if self.kind == "appended":
            return self.out(self.collect(x, [x]))
        if self.kind == "read":
            kept = [x]
            return self.out(self.collect(x, kept)) + kept[1]
        if self.kind == "popped":
            return self.take(x, [x.relu(), x.sigmoid()])
        seen: dict[str, Any] = {"first": x}
        return self.record(x, seen) + seen["first"]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


@pytest.mark.parametrize("kind", ["appended", "read", "popped", "recorded"])
def test_rewritten_right(kind: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(kind), Block(kind)), torch.randn(2, 5, D)
    result = resfx.rewrite(model, resfx.DeltaAttention(), (x,), warm_start=True)
    for value in (x, torch.randn(3, 7, D)):
        assert torch.allclose(result(value), model(value), atol=1e-6)
    called = {str(node.target) for node in result.graph.nodes if node.op == "call_module"}
    if kind in ("appended", "read"):
        assert {f"{i}.collect.layers.{j}" for i in range(2) for j in range(2)} <= called
