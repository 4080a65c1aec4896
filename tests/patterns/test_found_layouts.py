"""Streams that pass through cuts, joins and changes of layout: one stream, not one a site. Kinds that the zoo brought."""

from __future__ import annotations

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


@cases_of(__name__)
def test_found_through_layouts(case: Case) -> None:
    case.check()
