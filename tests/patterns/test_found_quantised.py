"""Quantised branches: the state goes through integers on its way to the weight; indices are integers that carry no state."""

from __future__ import annotations

import torch
from patterns_marks import Case, D, Net, case, cases_of
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """Activations rounded to int8 for each token, an int8 product, and the scales afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 127, (D, D), dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127
        rounded = (x / scale).round().to(torch.int8)
        product = torch._int_mm(rounded.reshape(-1, D), self.weight.t()).reshape(x.shape)
        return product.float() * scale / 127


@case()
class QuantisedBranches(Net):
    def setup(self) -> None:
        self.q = nn.ModuleList(Int8Linear() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.q[0](self.n(x))  # SITE
        return x + self.q[1](self.m(x))  # SITE


@case(streams=0)
class TableOfTheLargest(Net):
    """An index that was made from the state picks rows of a table: no weight maps the state."""

    def setup(self) -> None:
        self.table = nn.Embedding(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(x.argmax(-1))  # MISS structure: no term of the sum is computed


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()
