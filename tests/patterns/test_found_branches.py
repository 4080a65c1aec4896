"""Branches that end in a residual connection of their own, and skips that are more than the state as it was."""

from __future__ import annotations

import pytest
import torch
from new_parameters import perturb
from patterns_marks import Case, D, Net, case, cases_of
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import resfx

TOKENS = (2, 6, D)


@case(TOKENS, streams=4)
class SmoothedBranches(Net):
    """A short map ends each branch, and casts back to what came in."""

    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.map = nn.Linear(D, D)

        def forward(self, y: Tensor) -> Tensor:
            dtype = y.dtype
            y = (y + self.map(y)) / 2  # SITE x3
            return y.to(dtype)

    def setup(self) -> None:
        self.smooth = nn.ModuleList(self.Smoothed() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for smooth in self.smooth:
            x = x + smooth(self.f(self.n(x)))  # SITE x3
        return x


@case(TOKENS, streams=4)
class NormedAtTheEnd(Net):
    """The branch's own residual is normed by hand before it is added."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g, self.h):
            y = layer(self.n(x))
            y = y + self.f(y)  # SITE x3
            x = x + y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt()  # SITE x3
        return x


@case(TOKENS)
class ShiftedAndScaledSkip(Net):
    """Every update learns a gain and a bias of the skip and of the branch."""

    def setup(self) -> None:
        self.gains = nn.ParameterList(nn.Parameter(1 + 0.1 * self.a) for _ in range(8))
        self.biases = nn.ParameterList(nn.Parameter(0.1 * self.a) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = (x + self.biases[0]) * self.gains[0]
        for i, layer in enumerate((self.f, self.g, self.h), 1):
            y = (layer(self.n(x)) + self.biases[i]) * self.gains[i]
            x = y + (x + self.biases[i + 3]) * self.gains[i + 3]  # SITE x3
        return x


@case(TOKENS)
class AffineSkips(Net):
    """Every way to scale and shift the skip by numbers and Parameters."""

    def forward(self, x: Tensor) -> Tensor:
        x = (self.b - x) * self.a + self.f(x)  # SITE
        x = torch.addcmul(self.b, x, self.a) + self.g(x)  # SITE
        x = (x + 0.5) * self.a + self.h(x)  # SITE
        x = 0.5 - x + self.f(x)  # SITE
        x = torch.add(self.b, x, alpha=0.5) * self.a + self.g(x)  # SITE
        x = torch.addcmul(self.h(x), self.a, x)  # SITE
        return x + self.f(self.n(x))  # SITE


@case(TOKENS)
class ShiftedSkipThatIsKept(Net):
    """The shifted state is read elsewhere too; the branch reads it as it was."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for layer in (self.f, self.g):
            shifted = x + self.a
            kept.append(shifted)
            x = shifted + layer(self.n(x))  # SITE x2
        return (x, *kept)


@cases_of(__name__)
def test_what_is_a_site(case: Case) -> None:
    found = case.check()
    assert not any(stream.refused for stream in found.streams)


@cases_of(__name__)
def test_a_rewrite_starts_as_the_model_and_moves(case: Case) -> None:
    plain, inputs = case.model().eval(), case.inputs()
    result = resfx.rewrite(plain, resfx.DeltaAttention(), inputs, warm_start=True)
    assert result.residual_map.refused == {}
    torch.testing.assert_close(_joined(result(*inputs)), _joined(plain(*inputs)), atol=1e-5, rtol=1e-5)
    perturb(result)
    assert not torch.allclose(_joined(result(*inputs)), _joined(plain(*inputs)), atol=1e-3)


@pytest.mark.parametrize("alike", ["type_as", "to", "view_as", "expand_as"])
def test_who_takes_a_dtype_or_a_shape_from_the_state_reads_no_numbers(alike: str) -> None:
    class NormedByHand(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.f, self.g):
                x = x + layer(x)
                x = getattr(x * x.square().mean(-1, keepdim=True).rsqrt(), alike)(x)
            return x + self.h(x)

    result = resfx.rewrite(NormedByHand().eval(), resfx.MultiGate(), (torch.randn(TOKENS),), warm_start=True)
    assert [reader.user.op for reader in result.residual_map.streams[0].readers if reader.role == "tap"] == ["output"]
    assert not [name for name, _ in result.named_parameters() if ".tap" in name]


def test_what_is_cast_as_the_state_tells_its_feature_axis() -> None:
    """Normed over two axes in one, and mixed back by a vector: neither end of the branch tells."""

    class Copies(Net):
        def forward(self, x: Tensor) -> Tensor:
            gains = torch.ones(2, 1)
            for layer in (self.f, self.g):
                wide = x.float().flatten(2)
                normed = wide * wide.square().mean(-1, keepdim=True).rsqrt()
                mixed = (normed.unflatten(2, (2, D)).type_as(x) * gains).sum(2)
                x = x + layer(mixed).unsqueeze(2) * gains
            return x

    found = resfx.find(Copies().eval(), (torch.randn(2, 6, 2, D),))
    assert [(len(stream.sites), stream.axis) for stream in found.streams] == [(2, -1)]


def _joined(output: object) -> Tensor:
    return torch.cat([part.flatten() for part in pytree.tree_leaves(output)])
