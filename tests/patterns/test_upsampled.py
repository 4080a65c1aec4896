"""Residual blocks right behind an upsample: the state comes from another resolution, its update does not."""

from __future__ import annotations

from patterns_marks import Case, ConvNet, D, case, cases_of
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE = (1, D, 4, 4)


class UpNet(ConvNet):
    def setup(self) -> None:
        super().setup()
        self.up = nn.ModuleList(nn.ConvTranspose2d(D, D, 2, 2) for _ in range(2))


@case(IMAGE, streams=2)
class TransposedConvolutions(UpNet):
    def forward(self, x: Tensor) -> Tensor:
        for up, block in zip(self.up, (self.f, self.g), strict=True):
            x = up(x)
            x = x + block(self.n(x))  # SITE x2
        return x


@case(IMAGE, streams=2)
class Interpolations(UpNet):
    def forward(self, x: Tensor) -> Tensor:
        for block in (self.f, self.g):
            x = F.interpolate(x, scale_factor=2.0)
            x = block(x) + x  # SITE x2
        return x


@case((1, 4 * D, 4, 4))
class PixelShuffle(UpNet):
    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_shuffle(x, 2) * 0.5
        return x + self.f(x)  # SITE


@case(IMAGE, streams=2)
class NestedBlock(UpNet):
    """A residual inside the branch: the outer sum does not go round it to another resolution."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.up[0](x)
        inner = self.f(x)
        inner = inner + self.h(inner)  # SITE
        x = x + self.g(inner)  # SITE
        return x + self.f(x)  # SITE


@case(IMAGE, streams=2)
class MergeAfterTheBlock(UpNet):
    """The block is a site; what comes back from a smaller image, and goes round that block, is none."""

    def forward(self, x: Tensor) -> Tensor:
        fine = x + self.f(x)  # SITE
        low = F.avg_pool2d(fine, 4)
        low = self.up[0](low)
        low = low + self.g(low)  # SITE
        return fine + F.interpolate(low, scale_factor=2.0)  # MISS shape: another resolution


@case(IMAGE, streams=0)
class TopDownPath(UpNet):
    """A pyramid: the upsampled state is added to what a convolution makes of the finer level."""

    def forward(self, x: Tensor) -> Tensor:
        fine = self.f(x)
        coarse = self.g(F.max_pool2d(fine, 2))
        return self.up[0](coarse) + self.h(fine)  # MISS structure: computed from another


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()
