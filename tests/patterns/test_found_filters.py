"""Long convolutions and filters: a weight that meets the state's frequencies maps it; a rotation of complex pairs is none."""

from __future__ import annotations

import torch
from patterns_marks import Case, D, Net, case, cases_of
from torch import Tensor, nn

import resfx


@case((2, 6, D))
class GlobalFilter(Net):
    """GFNet, with the filter alone as the branch."""

    def setup(self) -> None:
        self.filter = nn.Parameter(torch.randn(4, D, 2))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.n(x), dim=1, norm="ortho") * torch.view_as_complex(self.filter)
        x = x + torch.fft.irfft(spectrum, n=6, dim=1, norm="ortho")  # SITE
        return x + self.g(x)  # SITE


@case((2, 6, D), streams=2)
class LongConvolution(Net):
    """Hyena: the filter is made by a small network of the place, and the signal itself is added to what comes out."""

    def setup(self) -> None:
        self.register_buffer("places", torch.randn(6, D))

    def forward(self, x: Tensor) -> Tensor:
        signal = self.f(self.n(x)).mT
        spectrum = torch.fft.rfft(signal, n=12) * torch.fft.rfft(self.g(self.places).mT, n=12)
        mixed = torch.fft.irfft(spectrum, n=12)[..., :6]
        mixed = mixed + signal * self.a[:, None]  # SITE
        return x + self.h(mixed.mT)  # SITE


@case(streams=0)
class ComplexRope(Net):
    """A rotation of complex pairs, and a learned phase of them: nothing is mixed."""

    def setup(self) -> None:
        self.register_buffer("turns", torch.polar(torch.ones(5, D // 2), torch.randn(5, D // 2)))
        self.phase = nn.Parameter(torch.randn(5, D // 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        turned = torch.view_as_real(pairs * self.turns * torch.view_as_complex(self.phase)).flatten(-2)
        return self.g(x + turned)  # MISS learned: meets no weight


@case((2, 6, D))
class FourierMixing(Net):
    """FNet: the first add has no weight."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x + torch.fft.fft2(x).real)  # MISS learned: meets no weight
        return x + self.f(x)  # SITE


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()


def test_found_by_symbolic_tracing() -> None:
    """There `x.mT` is an attribute."""
    model, x = LongConvolution().eval(), torch.randn(2, 6, D)
    assert len(resfx.find(model, (x,), frontend="fx").sites) == 2
