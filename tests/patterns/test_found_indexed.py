"""Updates added to the chosen rows of a state by an indexed add: graph networks, mixtures of depths."""

from __future__ import annotations

import pytest
import torch
from patterns_marks import CASES, Case, D, Net, case, cases_of
from torch import Tensor, nn

import resfx

ROWS = torch.tensor([0, 2, 2, 4])


class Rows(Net):
    """The state is [5, D]."""

    def setup(self) -> None:
        self.register_buffer("rows", ROWS)


@case((5, D))
class IndexAdd(Rows):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            x = x.index_add(0, self.rows, layer(self.n(x))[:4])  # SITE x2
        return x + self.h(x)  # SITE


@case((5, D))
class IndexAddInPlace(Rows):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        for layer in (self.f, self.g):
            x.index_add_(0, self.rows, layer(x)[:4], alpha=0.5)  # SITE x2
        return x


@case((5, D))
class IndexPut(Rows):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            x = x.index_put((self.rows,), layer(x)[:4], accumulate=True)  # SITE x2
        return x


@case((5, D))
class ScatterReduce(Rows):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows[:, None].expand(-1, D)
        x = x.scatter_reduce(0, rows, self.f(x)[:4], "sum")  # SITE
        return x.scatter_add(0, rows, self.g(x)[:4])  # SITE


@case()
class MixtureOfDepths(Net):
    """A router picks tokens; what the block makes of them is added to them."""

    def setup(self) -> None:
        self.router = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            weight, chosen = self.router(x).squeeze(-1).topk(2, 1)
            rows = chosen[..., None].expand(-1, -1, D)
            update = weight.sigmoid()[..., None] * layer(self.n(torch.gather(x, 1, rows)))
            x = torch.scatter_add(x, 1, rows, update)  # SITE x2
        return x


@case((5, D))
class Messages(Rows):
    """What is gathered at the nodes starts from zeros: the add to the state is the update."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            messages = layer(x[self.rows])
            x = x + torch.zeros_like(x).index_add(0, self.rows, messages)  # SITE x2
        return x


@case((5, D), streams=0)
class Experts(Rows):
    """Each expert adds to the rows it was given: no expert reads what the others added."""

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for layer in (self.f, self.g):
            out = out.index_add(0, self.rows, layer(x)[:4])
        return self.h(out)


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()


@pytest.mark.parametrize("case", [c for c in CASES[__name__] if c.streams], ids=lambda c: c.model.__name__)
def test_rewritten(case: Case) -> None:
    case.check_rewritten(resfx.DeltaAttention())
