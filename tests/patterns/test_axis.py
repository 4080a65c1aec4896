"""The feature axis is told by what stands next to the stream: norms, linear maps, convolutions."""

from __future__ import annotations

import pytest
import torch
from patterns_marks import CASES, ConvNet, D, Net, case
from torch import Tensor, nn
from torch.nn import functional as F

AXES: dict[type[nn.Module], int | None] = {}


def axis(expected: int | None, *shapes: tuple[int, ...]):  # type: ignore[no-untyped-def]
    def register(model: type[nn.Module]) -> type[nn.Module]:
        AXES[model] = expected
        return case(*shapes)(model)

    return register


@axis(-1)
class LayerNormLast(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(self.n(x))  # SITE


@axis(-1)
class RmsNormByHand(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = self.a * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
        return x + self.f(h)  # SITE


@axis(-3, (1, D, 8, 8))
class Convolutions(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return (x + self.n(self.f(x))).relu()  # SITE


@axis(-2, (2, D, 6))
class Convolutions1d(Net):
    def setup(self) -> None:
        self.f = nn.Sequential(nn.Conv1d(D, D, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)  # SITE


@axis(-1)
class Recurrent(Net):
    def setup(self) -> None:
        self.f = nn.GRU(D, D, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.f(x)
        return x + y  # SITE


@axis(-3, (3, D, 6, 6), (3, D))
class WeightsOfTheirOwn(ConvNet):
    """StyleGAN2: every sample has its own weight, so that samples and channels are one axis of a grouped convolution."""

    def setup(self) -> None:
        super().setup()
        self.kernel, self.style = nn.Parameter(torch.randn(1, D, D, 3, 3)), nn.Linear(D, D)

    def mapped(self, x: Tensor, style: Tensor) -> Tensor:
        samples, _, height, width = x.shape
        kernel = self.kernel * self.style(style)[:, None, :, None, None]
        kernel = kernel * torch.rsqrt(kernel.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        x = F.conv2d(x.reshape(1, -1, height, width), kernel.flatten(0, 1), padding=1, groups=samples)
        return x.view(samples, -1, height, width)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        return (x + self.mapped(F.leaky_relu(self.mapped(x, style)), style)) / 2**0.5  # SITE


@axis(-1, (2, 6, D))
class MlpMixer(Net):
    """Tokens and channels are mixed in turn: the norms tell which axis is the feature axis."""

    def setup(self) -> None:
        self.tokens = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.n(x).transpose(1, 2)).transpose(1, 2)  # SITE
        return x + self.f(self.m(x))  # SITE


@axis(-3, (1, D, 8, 8))
class ConvNeXt(ConvNet):
    def setup(self) -> None:
        super().setup()
        self.conv, self.up, self.norm = nn.Conv2d(D, D, 3, padding=1, groups=D), nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(self.conv(x).permute(0, 2, 3, 1)))
        return x + h.permute(0, 3, 1, 2)  # SITE


@axis(-1, (1, 8, 8, D))
class ConvolutionsInChannelsLast(ConvNet):
    """The state has its channels last and is permuted for each convolution."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)  # SITE


@axis(-2, (2, D, 6))
class StateMovedAfterTheFirstSite(Net):
    """The axis is counted in the layout that the stream starts with."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x.transpose(1, 2)).transpose(1, 2)  # SITE
        x = x.transpose(1, 2)
        return x + self.g(self.n(x))  # SITE


@axis(-2, (2, D, 3))
class StateSpace(Net):
    """Mamba: the scan mixes every channel by itself over the steps; the gain of the input tells which axis has the channels."""

    def setup(self) -> None:
        self.decay, self.gain = nn.Parameter(torch.rand(D)), nn.Parameter(torch.rand(D))

    def forward(self, x: Tensor) -> Tensor:
        state, states = torch.zeros_like(x[:, :, 0]), []
        for step in range(3):
            state = self.decay * state + (x[:, :, step, None] * x[:, :, step, None]).sum(-1)
            states.append((state[:, :, None] @ self.a[None, :1, None]).squeeze(-1))
        return torch.stack(states, -1) + x * self.gain[None, :, None]  # SITE


@axis(None, (5, 5))
class Contradiction(Net):
    """One branch maps the rows, the other one the columns: nothing tells which is the feature axis."""

    def setup(self) -> None:
        self.f, self.g = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)  # SITE
        return x + self.g(x.T).T  # SITE


@axis(-1, (2, 6, D))
class PoolingAlone(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x.mean(1, keepdim=True))  # SITE
        return x + self.g(x.mean(1))[:, None]  # SITE


@axis(-3, (2, D, 4, 4))
class ImagePooling(Net):
    """The pooled channels are the last axis of what the linear layer maps."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x.mean((2, 3)))[:, :, None, None]  # SITE


@axis(-3, (2, D, 4, 4))
class ImageSums(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x.sum((-2, -1), keepdim=True).flatten(1))[:, :, None, None]  # SITE


@axis(-3, (2, D, 4, 4))
class GroupNormByHand(ConvNet):
    """Its statistics take several axes and tell none: the convolution does, behind them."""

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, (1, 2, 3), keepdim=True)
        return x + self.f((x - mean) * torch.rsqrt(var + 1e-5))  # SITE


@pytest.mark.parametrize("case", CASES[__name__], ids=lambda c: c.model.__name__)
def test_axis(case) -> None:  # type: ignore[no-untyped-def]
    assert case.check().streams[0].axis == AXES[case.model]
