"""Models that are hard on the live mode: calls by other doors, graph breaks, layers that come and go."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, d: int = 8, broken: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.a, self.b, self.broken = nn.Linear(d, d), nn.Linear(d, d), broken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.a(self.norm1(x))
        if self.broken:
            torch._dynamo.graph_break()  # BREAK in a block
        return x + self.b(self.norm2(x)).relu()


class Stack(nn.Module):
    """The stream lies in `self.layers`; `breaks` says where the graph is broken, `skip` which layer is left out."""

    def __init__(self, breaks: str = "", d: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(d, broken=breaks == "block") for _ in range(depth))
        self.norm, self.breaks, self.skip = nn.LayerNorm(d), breaks, -1

    def forward(self, x: torch.Tensor, states: bool = False) -> Any:
        if self.breaks == "before":
            torch._dynamo.graph_break()
        seen = [x]
        for number, layer in enumerate(self.layers):
            if number == self.skip:
                continue
            x = layer(x)
            seen.append(x)
            if self.breaks == "between" and number == 0:
                torch._dynamo.graph_break()  # BREAK between blocks
        x = self.norm(x)
        return (x, *seen) if states else x


class Model(nn.Module):
    """An embedding, a stack, a head: what stands for a library's model."""

    def __init__(self, breaks: str = "", d: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.embed, self.stack, self.head = nn.Linear(d, d), Stack(breaks, d, depth), nn.Linear(d, 3)
        self.breaks = breaks

    def forward(self, x: torch.Tensor, states: bool = False) -> Any:
        x = self.embed(x)
        if self.breaks == "outside":
            torch._dynamo.graph_break()
        out = self.stack(x, states)
        if self.breaks == "outside":
            torch._dynamo.graph_break()
        return (self.head(out[0]), *out[1:]) if states else self.head(out)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """A way in that does not pass through `forward`."""
        result: torch.Tensor = self.stack(self.embed(x))
        return result


def model(breaks: str = "", depth: int = 2) -> Model:
    torch.manual_seed(0)
    return Model(breaks, depth=depth).eval()


def inputs(batch: int = 2, length: int = 5) -> torch.Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(1))


def line_of(text: str) -> str:
    """`live_toys.py:LINE` of the line that ends in `text`."""
    with open(__file__) as file:
        number = next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(text))
    return f"live_toys.py:{number}"
