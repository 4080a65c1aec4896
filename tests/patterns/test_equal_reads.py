"""A state that two equal operations read is one value: `x[:, rows] += f(x[:, rows])`."""

from __future__ import annotations

import pytest
import torch
from new_parameters import perturb
from patterns_marks import CASES, Case, D, Net, case, cases_of
from torch import Tensor

import resfx


class Rows(Net):
    def setup(self) -> None:
        self.register_buffer("rows", torch.tensor([0, 2, 3]))


@case(streams=2)
class ReadTwice(Rows):
    """Both sides of `+=` read the rows: two operations, one value. A list of indices is a new tensor each time."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        x[:, self.rows] += self.f(x[:, self.rows])  # SITE
        x[:, [0, 1]] += self.g(x[:, [0, 1]])  # SITE
        return x


@case(streams=2)
class ReadTwiceOutOfPlace(Rows):
    def forward(self, x: Tensor) -> Tensor:
        rows, at = self.rows[2:], torch.tensor([1, 2])[:, None].expand(-1, D)
        x = x.index_copy(1, rows, x.index_select(1, rows) + self.f(x.index_select(1, rows)))  # SITE
        return x[0].scatter(0, at, x[0].gather(0, at) + self.g(x[0].gather(0, at)))  # SITE


@case(streams=0)
class OtherRows(Rows):
    """Other rows, and the same rows of a value that was written in between."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        x[:, [0, 1]] += self.g(x[:, [0, 2]])  # MISS structure: computed from another
        rows = x[:, self.rows[:2]]
        x[:, :2] = self.h(x[:, :2])
        return rows + self.f(x[:, self.rows[:2]])  # MISS structure: computed from another


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("case", [c for c in CASES[__name__] if c.streams], ids=lambda c: c.model.__name__)
def test_rewritten(case: Case) -> None:
    case.check_rewritten(resfx.MultiGate())


class WrittenBetween(Rows):
    """Both reads have the same arguments, and the rows were written after the first: two values."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        before = x[:, self.rows]
        x[:, self.rows] = self.g(before)
        return before + self.f(x[:, self.rows])


@pytest.mark.parametrize("model", [ReadTwice, ReadTwiceOutOfPlace, WrittenBetween], ids=lambda model: model.__name__)
def test_attached(model: type[Net]) -> None:
    """Dynamo writes indices down as Python does, and assigns in place."""
    torch._dynamo.reset()
    x, live = torch.randn(2, 5, D), model().eval()
    static = resfx.rewrite(model().eval(), resfx.MultiGate(), (x,), warm_start=True).eval()
    perturb(static)
    resfx.attach(live, resfx.MultiGate(), (x,), backend="aot_eager", warm_start=True)
    assert torch.allclose(live(x), model().eval()(x), atol=1e-6)
    live.load_state_dict(static.state_dict())
    assert torch.allclose(live(x), static(x), atol=1e-6)
    assert not torch.allclose(live(x), model().eval()(x), atol=1e-4)
