"""Other sums on the source line of a site: they are told from the site, and hide no cut."""

from __future__ import annotations

from collections.abc import Callable

import live_toys
import pytest
import torch
from live_helpers import Pair, perturb
from torch import Tensor, nn
from torch.nn import functional

import resfx

FORM = resfx.DeltaAttention()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.modulation, self.position = nn.Linear(4, 24), nn.Linear(4, 8)
        self.cut = -1

    def maybe_break(self, number: int) -> None:
        if number == self.cut:
            torch._dynamo.graph_break()


class Modulated(Base):
    """The shift and scale of a norm stand on the site's line, as transformers for diffusion write it."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(c)[:, None].chunk(3, -1)
        for number, layer in enumerate(self.layers):
            x = x + gate * layer(self.norm(x) * (1 + scale) + shift)
            self.maybe_break(number)
        return x


class Injected(Base):
    """A term that is computed from no state, on the line of the site."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        e = self.position(c)[:, None]
        x = x + self.layers[0](functional.silu(x)) + e
        self.maybe_break(0)
        return x + self.layers[1](x)


class Positioned(Base):
    """The branch reads the state with a position added on the line of the site."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        p = self.position(c)[:, None]
        x = x + self.layers[0](x + p).relu()
        self.maybe_break(0)
        return x + self.layers[1](x + p).relu()


class Penalised(Base):
    """A second sum runs beside the stream, on its line."""

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        told = c.sum()
        for number, layer in enumerate(self.layers):
            u = layer(x)
            x, told = x + u, told + u.mean()
            self.maybe_break(number)
        return x, told


class Averaged(Base):
    """The branch is a sum of two, each as large as the state, on the line of the site."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        a, b = self.layers[0](x), self.layers[1](x)
        x = x + 0.5 * (a + 2 * b)
        self.maybe_break(0)
        return x + self.layers[2](x)


MODELS = [Modulated, Injected, Positioned, Penalised, Averaged]


def inputs(batch: int = 2, length: int = 5) -> tuple[Tensor, Tensor]:
    return live_toys.inputs(batch, length), torch.randn(batch, 4, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", MODELS)
def test_another_sum_on_the_line_of_a_site(kind: Callable[[], Base]) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return kind().eval()

    pair = Pair(make, FORM, inputs())
    pair.assert_same(*inputs())
    pair.assert_same(*inputs(3, 4), gradients=False)
    pair.assert_same(*inputs(2, 1), gradients=False)  # what is broadcast is as large as the state here


def attached_and_cut(kind: Callable[[], Base]) -> Base:
    """A model that has run rewritten, and has a break in its first layer from now on."""
    torch._dynamo.reset()
    model = kind().eval()
    resfx.attach(model, FORM, inputs(), backend="eager")
    perturb(model)
    model(*inputs())
    model.cut = 0
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_it_hides_no_cut(kind: Callable[[], Base]) -> None:
    model = attached_and_cut(kind)
    for _ in range(2):
        with pytest.raises(resfx.LiveError, match=r"break.*test_live_lines\.py"):
            model(*inputs())


class Twice(Injected):
    """The whole stack once, and once more with a break in it: the first run must not answer for the second."""

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        cut, self.cut = self.cut, -1
        y = super().forward(x, c) if cut >= 0 else x
        self.cut = cut
        result: Tensor = super().forward(y, c)
        return result


def test_a_cut_behind_a_whole_run() -> None:
    model = attached_and_cut(Twice)
    with pytest.raises(resfx.LiveError, match=r"break.*test_live_lines\.py"):
        model(*inputs())
