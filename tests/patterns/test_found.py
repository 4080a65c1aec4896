"""Residual updates in every spelling: the positive twins of test_rejected."""

from __future__ import annotations

import pytest
import torch
from patterns_marks import CASES, Case, ConvNet, D, Net, case, cases_of
from torch import Tensor, nn
from torch.nn import functional as F

import resfx

IMAGE = (1, D, 8, 8)


# -- spellings of the add


@case()
class Subtractive(Net):
    """N-BEATS: what a branch explains is taken away."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            x = x - layer(x)  # SITE x2
        return x


@case()
class Alpha(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.add(x, self.f(x), alpha=0.5)  # SITE
        return torch.sub(x, self.g(x), alpha=2)  # SITE


@case()
class InPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        x += self.f(x)  # SITE
        x.add_(self.g(x))  # SITE
        return x


@case()
class PythonSum(Net):
    def forward(self, x: Tensor) -> Tensor:
        return sum([x, self.f(x), self.g(x)])  # SITE


@case()
class StackAndSum(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.stack([x, self.f(x), self.g(x)]).sum(0)  # SITE
        return torch.stack([x, self.h(x)], dim=-1).sum(dim=-1)  # SITE


@case()
class StackAndMean(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.f(x), x], 1).mean(1)  # SITE


@case()
class Einsum(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("n,nbsd->bsd", torch.ones(2), torch.stack([x, self.f(x)]))  # SITE


@case((5, D))
class FusedProducts(Net):
    def setup(self) -> None:
        self.w = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.addcmul(x, self.f(x), self.a, value=0.5)  # SITE
        return torch.addmm(x, self.n(x), self.w)  # SITE


@case()
class BatchedProduct(Net):
    def setup(self) -> None:
        self.w = nn.Parameter(torch.randn(1, D, D))

    def forward(self, x: Tensor) -> Tensor:
        return torch.baddbmm(x, self.n(x), self.w.expand(x.shape[0], -1, -1))  # SITE


@case()
class BroadcastBranch(Net):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x.mean(1, keepdim=True))  # SITE


# -- what lies on the skip


@case()
class ScaledIdentity(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = 0.5 * x + self.f(x)  # SITE
        x = (x + self.g(x)) / 2**0.5  # SITE
        return x + self.h(x)  # SITE


@case()
class LearnedSkipScale(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.a * x + self.f(x)  # SITE
        return x * self.b + self.g(x)  # SITE


@case()
class LearnedMix(Net):
    """One learned number weighs state and branch: a scaled identity, no gate, for it isn't computed from the input."""

    def setup(self) -> None:
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        t = self.gate.sigmoid()
        return t * x + (1 - t) * self.f(x)  # SITE


@case()
class Relaxation(Net):
    """`x + a (f(x) - x)` with a number a: the outer add is the update."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            difference = layer(x) - x
            x = x + 0.3 * difference  # SITE x2
        return x


@case()
class PostNormByHand(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            x = x + layer(x)  # SITE x2
            x = self.a * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
        return x


@case()
class PostNormByHandInFloat64(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            x = x + layer(x)  # SITE x2
            wide = x.double()
            x = self.a * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).float()
        return x


@case(IMAGE)
class ReluAfterTheAdd(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x + self.f(x))  # SITE
        return F.relu(x + self.g(x))  # SITE


@case(IMAGE)
class ChannelsMoved(ConvNet):
    """ConvNeXt: the branch works on channels last."""

    def setup(self) -> None:
        super().setup()
        self.up, self.norm = nn.Linear(D, D), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.f, self.g):
            h = self.up(self.norm(conv(x).permute(0, 2, 3, 1)))
            x = x + (self.a * h).permute(0, 3, 1, 2)  # SITE x2
        return x


@case()
class StateMoved(Net):
    """The state itself changes its layout between two sites: one stream."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)  # SITE
        x = x.transpose(0, 1)
        x = x + self.g(x)  # SITE
        return x.transpose(0, 1)


# -- parts of the state


@case()
class ClassToken(Net):
    def forward(self, x: Tensor) -> Tensor:
        token = x[:, :1] + self.f(x[:, :1])  # SITE
        x = torch.cat([token, x[:, 1:]], 1)
        return x + self.g(x)  # SITE


@case()
class SliceInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x)
        x[:, 0] += self.f(x[:, 0])  # SITE
        x[:, 1:3] = x[:, 1:3] + self.g(x[:, 1:3])  # SITE
        return x


@case((2, 5, D))
class ClassTokenAlone(Net):
    """CrossViT: the class token attends to all, and leaves the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        token = x[:, 0:1] + (self.f(h[:, 0:1]) @ self.g(h).mT).softmax(-1) @ self.g(h)  # SITE
        return token + self.h(token)  # SITE


@case(streams=2)
class ReversibleCoupling(Net):
    def setup(self) -> None:
        self.f, self.g = nn.Linear(D // 2, D // 2), nn.Linear(D // 2, D // 2)

    def forward(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        one = one + self.f(two)  # SITE
        two = two + self.g(one)  # SITE
        return torch.cat([one, two], -1)


# -- streams beside, inside and after each other


@case(streams=2)
class ScoreStream(Net):
    def forward(self, x: Tensor) -> Tensor:
        before = None
        for layer in (self.f, self.g, self.h):
            q = layer(x)
            scores = q @ q.transpose(-1, -2)
            if before is not None:
                scores = scores + before  # SITE x2
            x, before = x + scores.softmax(-1) @ layer(x), scores  # SITE x3
        return x


@case()
class ParallelBranches(Net):
    """GPT-J: two branches of one state are one site, however bracketed."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        x = x + self.f(h) + self.g(h)  # SITE
        h = self.m(x)
        return x + (self.f(h) + self.h(h))  # SITE


@case()
class BranchWithNorms(Net):
    """FastViT: in the branch a norm of the state is added to a map of it, and another one taken away."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.f, self.g, self.h):
            mixed = self.m(x) + layer(x)
            x = x + self.a * (mixed - self.n(x))  # SITE x3
        return x


@case()
class DeferredAdd(Net):
    """Add and norm in one step at the start of the next sublayer; the state travels as a pair."""

    def forward(self, x: Tensor) -> Tensor:
        update, state = self.f(self.n(x)), x
        for layer in (self.g, self.h):
            state = state + update  # SITE x2
            update = layer(self.m(state))
        return state + update  # SITE


@case(streams=2)
class Nested(Net):
    def forward(self, x: Tensor) -> Tensor:
        inner = self.f(x)
        inner = inner + self.g(inner)  # SITE
        return x + self.h(inner)  # SITE


@case(IMAGE, streams=2)
class LongSkip(ConvNet):
    """`f + end(trunk(f))`: the trunk keeps the resolution, so it is no encoder-decoder merge."""

    def forward(self, x: Tensor) -> Tensor:
        trunk = x
        for layer in (self.f, self.g):
            trunk = trunk + layer(trunk)  # SITE x2
        return x + self.h(trunk)  # SITE


@case(IMAGE)
class CoarseAttention(ConvNet):
    """A branch that works on a smaller image, in a stream of its own resolution."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.interpolate(self.f(F.avg_pool2d(x, 2)), scale_factor=2.0)  # SITE
        return x + self.g(x)  # SITE


@case()
class TiedLoop(Net):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + self.f(self.n(x))  # SITE x3
            x = x + self.g(self.m(x))  # SITE x3
        return x


@case(unweighted=True)
class Unweighted(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.fft.fft2(x).real  # SITE
        return x + self.f(x)  # SITE


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()


def find(model: type[nn.Module]) -> resfx.ResidualMap:
    return next(case for case in CASES[__name__] if case.model is model).find()


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (Subtractive, ["plain", "plain"]),
        (ScaledIdentity, ["scaled", "plain", "plain"]),
        (LearnedSkipScale, ["scaled", "scaled"]),
        (StackAndMean, ["scaled"]),
        (ClassToken, ["slice", "plain"]),
        (SliceInPlace, ["slice", "slice"]),
        (ReversibleCoupling, ["coupling", "coupling"]),
        (TiedLoop, ["plain"] * 6),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_kinds(model: type[nn.Module], kinds: list[str]) -> None:
    assert [site.kind for site in find(model).sites] == kinds


def test_a_coupling_is_never_rewritten() -> None:
    found = find(ReversibleCoupling)
    assert not any(site.rewritable for site in found.sites)
    assert all("coupling" in (stream.refused or "") for stream in found.streams)


def test_parallel_branches_are_counted() -> None:
    assert [len(site.branches) for site in find(ParallelBranches).sites] == [2, 2]
    assert [len(site.branches) for site in find(PythonSum).sites] == [2]


def test_signs_and_factors_of_terms() -> None:
    assert [term.scale for site in find(Subtractive).sites for term in site.terms] == [-1, -1]
    assert [term.scale for site in find(Alpha).sites for term in site.terms] == [0.5, -2]


def test_fused_products_are_terms() -> None:
    (product,), (mapped,) = (site.terms for site in find(FusedProducts).sites)
    assert (product.op, product.scale, len(product.operands)) == ("mul", 0.5, 2)
    assert (mapped.op, mapped.scale, len(mapped.operands)) == ("mm", 1, 2)


def test_loops() -> None:
    found = find(TiedLoop)
    assert [(loop.count, loop.branches, loop.sites) for loop in found.loops] == [(3, 2, (0, 1, 2, 3, 4, 5))]
    assert [site.branch_id for site in found.sites] == [0, 1, 0, 1, 0, 1]
    assert find(Nested).loops == []


def test_transitions() -> None:
    for model in (PostNormByHand, PostNormByHandInFloat64):
        first, last = find(model).sites
        assert {"pow", "mean", "rsqrt", "mul"} <= set(first.transition)
        assert last.transition == ()  # what follows the last site only reads the stream
    assert [site.transition for site in find(ReluAfterTheAdd).sites] == [("relu",), ()]
    assert not any(site.transition for site in find(ParallelBranches).sites)


def test_unweighted_is_off_by_default() -> None:
    found = resfx.find(Unweighted().eval(), (torch.randn(2, 5, D),))
    assert len(found.sites) == 1
