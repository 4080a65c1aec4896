"""Sums whose state is none: it cancels, no input has reached it, or numbers are left out of the sum."""

from __future__ import annotations

import torch
from new_parameters import perturb
from patterns_marks import Case, D, Net, case, cases_of
from torch import Tensor, nn

import resfx


@case()
class Cancelled(Net):
    """`x + (f(x) - x)` is f(x): a stream ends here, and the next one starts."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.f(x) - x)  # MISS structure: added and subtracted again
        return x + self.g(x)  # SITE


class Difference(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.f(x) - x


@case(streams=2)
class CancelledAcrossModules(Net):
    def setup(self) -> None:
        self.difference = Difference()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.h(x)  # SITE
        x = x + self.difference(x)  # MISS structure: added and subtracted again
        return x + self.g(x)  # SITE


@case()
class SubtractedInPart(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x + (self.f(x) - 0.5 * x)  # SITE


@case(streams=0)
class Distances(Net):
    """Losses: of a difference from the input no more than its size is read."""

    def forward(self, x: Tensor) -> Tensor:
        squared = (self.f(x) - x) ** 2  # MISS structure: a distance
        absolute = (x - self.g(x)).float().abs()  # MISS structure: a distance
        difference = self.h(x) - x  # MISS structure: a distance
        return squared.mean() + absolute.mean(-1).sum() + (difference * difference).mean()


@case()
class DifferenceWhoseSizeIsReadToo(Net):
    """A denoiser that returns the clean input, beside how much noise is left."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        clean = x - self.f(x)  # SITE
        return clean, clean.square().mean()


@case()
class LearnedQueries(Net):
    """The first update is the same in every call: the state runs from where the input comes in."""

    def setup(self) -> None:
        self.queries = nn.Parameter(torch.randn(1, 4, D))

    def forward(self, x: Tensor) -> Tensor:
        q = self.queries
        q = q + self.f(q)  # MISS structure: parameters alone
        q = q.expand(2, -1, -1)
        q = q + self.g((q @ x.mT).softmax(-1) @ x)  # SITE
        return q + self.h(q)  # SITE


@case(streams=0)
class SumsOfParameters(Net):
    """Nothing here is computed from what it is added to: no near miss."""

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x) * (self.a + self.b) @ (self.f[0].weight + self.g[0].weight)


@case()
class SumWithoutNans(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.nansum(torch.stack([x, self.f(x)]), 0)  # MISS structure: no plain sum
        return x + self.g(x)  # SITE


@case()
class KeptAxis(Net):
    """The axis that was summed over is squeezed away afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, self.f(x)], 1).sum(1, keepdim=True).squeeze(1)  # SITE
        x = torch.stack([x, self.g(x)], -1).mean(-1, keepdim=True).squeeze(-1)  # SITE
        return x + self.h(x)  # SITE


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()
    assert case.model is not SumsOfParameters or not case.find().rejected


def test_kept_axis_rewritten() -> None:
    model, x = KeptAxis().eval(), torch.randn(2, 5, D)
    result = resfx.rewrite(model, resfx.DeltaAttention(), (x,), warm_start=True).eval()
    assert torch.allclose(result(x), model(x), atol=1e-6)
    perturb(result)
    assert not torch.allclose(result(x), model(x), atol=1e-4)
