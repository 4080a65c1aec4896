"""Streams that pass through cuts, joins and changes of layout: one stream, not one a site. Kinds that the zoo brought."""

from __future__ import annotations

import torch
from patterns_marks import Case, D, Net, case, cases_of
from torch import Tensor

import resfx


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


@case((2, 8, D))
class JoinedBlocks(Net):
    """Block-sparse attention: the length of what is added is an expression that nothing proves to be the state's."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            batch, length, _ = x.shape
            blocks = length // 4
            y = layer(x).view(batch, blocks, length // blocks, D)
            x = y.reshape(batch, blocks * (length // blocks), D) + x  # SITE x2
        return x


@case((2, 1, D), (2, 5, D), streams=0)
class BroadcastState(Net):
    """A state of one token is no state of the sum's shape."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = self.n(x)
        return x + self.f(x * tokens)  # MISS shape: another shape than its term layer_norm: [s


@case()
class Mapped(Net):
    """The second block sees one sample at a time: vmap hides an axis of the state in between."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)  # SITE
        return torch.func.vmap(lambda sample: sample + self.g(sample))(x)  # SITE


@cases_of(__name__)
def test_found_through_layouts(case: Case) -> None:
    case.check()


def test_no_site_of_a_stream_that_vmap_enters_is_rewritable() -> None:
    found = resfx.find(Mapped().eval(), (torch.randn(2, 5, D),))
    assert [site.rewritable for site in found.sites] == [False, False]
    assert all("changes how many numbers" in (site.refused or "") for site in found.sites)
