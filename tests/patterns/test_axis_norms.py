"""The feature axis beside norms written by hand, which tell it, and pooling over the tokens, which must not."""

from __future__ import annotations

import pytest
import torch
from patterns_marks import D, Net
from torch import Tensor, nn
from torch.nn import functional as F

import resfx


class Mixer(Net):
    """Two maps over the tokens and one over the features: only a norm can tell."""

    def setup(self) -> None:
        self.tokens, self.more = nn.Linear(6, 6), nn.Linear(6, 6)

    def norm(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norm(x).mT).mT
        x = x + self.more(self.norm(x).mT).mT
        return x + self.f(self.norm(x))


class MeanAndDeviation(Mixer):
    def norm(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5) * self.a + self.b


class VarMean(Mixer):
    def norm(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, -1, keepdim=True)
        return self.a * ((x - mean) * torch.rsqrt(var + 1e-5))


class MeanOfSquares(Mixer):
    def norm(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


class SquaresLessMean(Mixer):
    def norm(self, x: Tensor) -> Tensor:
        mean = x.mean(-1)
        var = (x * x).mean(-1) - mean * mean
        return (x - mean[..., None]) * (var[..., None] + 1e-5).pow(-0.5)


class RmsInAnotherDtype(Mixer):
    def norm(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.a * (x * scale).to(x.dtype)


class UnitLength(Mixer):
    def norm(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.a


class UnitLengthOfFourAxes(Mixer):
    def norm(self, x: Tensor) -> Tensor:
        return F.normalize(x[:, None], dim=-1)[:, 0]


class ByReciprocal(Mixer):
    def norm(self, x: Tensor) -> Tensor:
        return x * (1 / x.norm(dim=-1, keepdim=True))


class Gated(Net):
    """A causal model beside a branch that pools over the tokens."""

    def pooled(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x = x + self.pooled(x)
        return x + self.h(x)


class MeanOverTokens(Gated):
    def pooled(self, x: Tensor) -> Tensor:
        return self.g(x.mean(1))[:, None]


class MeanOverTokensKept(Gated):
    def pooled(self, x: Tensor) -> Tensor:
        return self.g(x.mean(1, keepdim=True))


class SqueezeExcite(Gated):
    """What was pooled comes back as a gate."""

    def pooled(self, x: Tensor) -> Tensor:
        return x * self.g(x.mean(1, keepdim=True)).sigmoid()


class MeanAndDeviationOverTokens(Gated):
    """Statistics pooling of speakers: both go into a map."""

    def setup(self) -> None:
        self.stats = nn.Linear(2 * D, D)

    def pooled(self, x: Tensor) -> Tensor:
        return self.stats(torch.cat([x.mean(1), x.std(1)], -1))[:, None]


class CentredOverTokens(Gated):
    def pooled(self, x: Tensor) -> Tensor:
        return self.g(x - x.mean(1, keepdim=True))


class ResponseNormOverTokens(Gated):
    """The size over the tokens weighs, and is itself what is divided."""

    def pooled(self, x: Tensor) -> Tensor:
        size = x.norm(dim=1, keepdim=True)
        return self.g(x * (size / (size.mean(-1, keepdim=True) + 1e-6)))


class AttentionPooling(Gated):
    """Global context: the weights of the tokens are computed from the state and map nothing."""

    def setup(self) -> None:
        self.score = nn.Linear(D, 1)

    def pooled(self, x: Tensor) -> Tensor:
        return self.g((x.mT @ self.score(x).softmax(1)).mT)


@pytest.mark.parametrize("model", [*Mixer.__subclasses__(), *Gated.__subclasses__()], ids=lambda model: model.__name__)
def test_axis(model: type[Net]) -> None:
    found = resfx.find(model().eval(), (torch.randn(2, 6, D),))
    assert [(stream.axis, len(stream.sites)) for stream in found.streams] == [(-1, 3)]
