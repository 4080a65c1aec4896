"""Streams that pass through cuts, joins and changes of layout: one stream, not one a site. Kinds that the zoo brought."""

from __future__ import annotations

import torch
from patterns_marks import Case, Net, case, cases_of
from torch import Tensor


@case()
class CutAtItsOwnLength(Net):
    """LUKE: the words of a sequence that holds nothing but words."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.size(1)
        for layer in (self.f, self.g):
            x = self.n(x + layer(x))[:, :words, :]  # SITE x2
        return x


@case()
class NormOfAPart(Net):
    """XCiT's class attention: only the first token is normed, and put back in its place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        x = x + self.f(x)  # SITE
        x = torch.cat([self.m(x[:, 0:1]), x[:, 1:]], dim=1)
        x = x + self.g(x)  # SITE
        x = torch.cat([x[:, :2], self.n(x[:, 2:4].relu()), x[:, 4:]], dim=1)
        return x + self.h(x)  # SITE


@case(streams=2)
class NormOfAPartElsewhere(Net):
    """The same tokens in another order: what lies beside the state would no longer fit it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        x = x + self.f(x)  # SITE
        x = torch.cat([x[:, 1:], self.m(x[:, 0:1])], dim=1)
        return x + self.g(x)  # SITE


@case(streams=2)
class NormOfAPartFromElsewhere(Net):
    """One part comes from another value."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        y = x + self.f(x)  # SITE
        y = torch.cat([x[:, 0:1], y[:, 1:]], dim=1)
        return y + self.g(y)  # SITE


@cases_of(__name__)
def test_found_through_layouts(case: Case) -> None:
    case.check()
