"""Sums that look like `x + f(x)` and are none: one model per guard, with the stage and the words of its refusal."""

from __future__ import annotations

import torch
from patterns_marks import Case, ConvNet, D, Net, case, cases_of
from torch import Tensor, nn
from torch.nn import functional as F

IMAGE = (1, D, 8, 8)


# -- no weight on the way: `learned`


@case(streams=0)
class RopeHalves(Net):
    def setup(self) -> None:
        self.register_buffer("cos", torch.randn(5, D))
        self.register_buffer("sin", torch.randn(5, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.f(x), self.g(x)
        half = torch.cat([-q[..., D // 2 :], q[..., : D // 2]], -1)
        q = q * self.cos + half * self.sin  # MISS learned: meets no weight
        return (q @ k.transpose(-1, -2)).softmax(-1) @ x


@case(streams=0)
class RopeInterleaved(Net):
    def setup(self) -> None:
        self.register_buffer("cos", torch.randn(5, D // 2))
        self.register_buffer("sin", torch.randn(5, D // 2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.f(x)
        even, odd = q[..., ::2], q[..., 1::2]
        turned = torch.stack(
            [
                even * self.cos - odd * self.sin,  # MISS learned: meets no weight
                even * self.sin + odd * self.cos,
            ],
            -1,
        )
        return turned.flatten(-2)


@case(streams=0)
class GeluByHand(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        inner = x + 0.044715 * x**3  # MISS learned: meets no weight
        return self.g(0.5 * x * (1 + torch.tanh(0.79788456 * inner)))


@case(streams=0)
class Snake(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        return self.g(x + torch.sin(self.a * x) ** 2 / self.a)  # MISS learned: meets no weight


@case(streams=0)
class GlobalResponseNorm(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        size = x.norm(dim=1, keepdim=True)
        scaled = x * (size / (size.mean(-1, keepdim=True) + 1e-6))
        return self.g(self.a * scaled + self.b + x)  # MISS learned: meets no weight


@case(IMAGE, streams=0)
class FixedFilter(ConvNet):
    def setup(self) -> None:
        super().setup()
        self.register_buffer("blur", torch.ones(D, 1, 3, 3) / 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        return self.g(x + F.conv2d(x, self.blur, padding=1, groups=D))  # MISS learned: meets no weight


@case(streams=0)
class PooledBranch(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        return self.g(x + x.mean(1, keepdim=True))  # MISS learned: meets no weight


@case(IMAGE, streams=0)
class BatchNormOnTheSkip(ConvNet):
    """RepVGG: an identity branch with its own norm beside two convolutions."""

    def setup(self) -> None:
        super().setup()
        self.one = nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.n(x) + self.f[0](x) + self.one(x))  # MISS structure: computed from another


@case(streams=0)
class StraightThrough(Net):
    """`x + (quantised - x).detach()`: the numbers of `quantised`, the gradient of x."""

    def setup(self) -> None:
        self.codes = nn.Parameter(torch.randn(11, D))

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        nearest = torch.cdist(x, self.codes[None].expand(x.shape[0], -1, -1)).argmin(-1)
        return self.g(x + (self.codes[nearest] - x).detach())  # MISS learned: meets no weight


# -- nothing in the sum is computed from another part of it: `structure`


@case((2, 5, D), (5, 5), streams=0)
class Masks(Net):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.f(x) @ self.g(x).transpose(-1, -2)
        scores = scores + mask  # MISS structure: computed from another
        return scores.softmax(-1) @ self.h(x)


@case((2, 5, D), (2, 5, D))
class PositionsInEachLayer(Net):
    """DETR: the position embedding is added to queries and keys again in each layer."""

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        place = self.h(place)
        for layer in (self.f, self.g):
            q = layer(x + place)  # MISS structure: computed from another
            x = x + (q @ q.transpose(-1, -2)).softmax(-1) @ layer(x)  # SITE x2
        return x


@case((2, 5, D), (2, 5, 5))
class BiasOnEachScore(Net):
    """T5, with a bias computed from a second input."""

    def setup(self) -> None:
        self.pair = nn.Linear(5, 5)

    def forward(self, x: Tensor, pair: Tensor) -> Tensor:
        bias = self.pair(pair)
        for layer in (self.f, self.g, self.h):
            q = layer(x)
            scores = q @ q.transpose(-1, -2) + bias  # MISS structure: computed from another
            x = x + scores.softmax(-1) @ layer(x)  # SITE x3
        return x


@case()
class BiasFromTheStream(Net):
    """The same with a bias computed once from the stream's start: later scores depend on it through x only."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.n(x)
        bias = start @ start.transpose(-1, -2) * self.b[:5]
        for layer in (self.f, self.g, self.h):
            q = layer(x)
            scores = q @ q.transpose(-1, -2) + bias  # MISS order: added again and again
            x = x + scores.softmax(-1) @ layer(x)  # SITE x3
        return x


@case(IMAGE, streams=0)
class FeaturePyramid(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        low = self.f(x)
        high = self.g(F.max_pool2d(low, 2))
        up = F.interpolate(self.h(high), scale_factor=2.0)
        return self.g(low) + up  # MISS structure: computed from another


@case(streams=0)
class ExpertsGathered(Net):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.h(x).softmax(-1)
        out = torch.zeros_like(x)
        for i, expert in enumerate((self.f, self.g)):
            out = out + gate[..., i : i + 1] * expert(x)  # MISS structure: computed from another
        return out


@case(IMAGE, streams=0)
class ProjectionShortcut(ConvNet):
    def setup(self) -> None:
        super().setup()
        self.short = nn.Conv2d(D, D, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.short(x) + self.g(self.f(x)))  # MISS structure: computed from another


@case(IMAGE, streams=0)
class ChunkSums(ConvNet):
    """Res2Net: each chunk is added to the result of the one before it."""

    def setup(self) -> None:
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: list[Tensor] = []
        for conv, chunk in zip(self.convs, x.chunk(4, 1)[:3], strict=True):
            piece = chunk if not out else out[-1] + chunk  # MISS structure: computed from another
            out.append(conv(piece))
        return torch.cat(out, 1)


@case(streams=0)
class PartsOfOneValue(Net):
    """What is computed from one part is added to another one, and nothing reads the whole."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.f(x)
        first, last = x[:, :2], x[:, 3:]
        return last + self.g(first)  # MISS structure: not put back


@case(streams=0)
class LowRankAdapter(Net):
    def setup(self) -> None:
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.f[0](x) + self.up(self.down(x)) * 0.5  # MISS structure: computed from another


@case((2, 5, D), (2, 5, D))
class SideAdds(Net):
    """ControlNet: features of a second network are added to the stream."""

    def forward(self, x: Tensor, hint: Tensor) -> Tensor:
        x = x + self.f(x)  # SITE
        hint = self.h(hint)
        x = x + self.g(hint)  # MISS structure: computed from another
        return x + self.g(x)  # SITE


# -- mixes of state and branch: `structure`


@case(streams=0)
class ConvexGate(Net):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.h(x).sigmoid()
        return gate * self.f(x) + (1 - gate) * x  # MISS structure: gated mix


@case(streams=0)
class ConvexGateBySubtraction(Net):
    def forward(self, x: Tensor) -> Tensor:
        gate = self.h(x).sigmoid()
        difference = self.f(x) - x  # MISS structure: a difference
        return x + gate * difference  # MISS structure: gated mix


@case(streams=0)
class ConvexGateFused(Net):
    def forward(self, x: Tensor) -> Tensor:
        difference = self.f(x) - x  # MISS structure: a difference
        return torch.addcmul(x, self.h(x).sigmoid(), difference)  # MISS structure: gated mix


@case(streams=0)
class ConvexGateIntoTheBranch(Net):
    """The gate weighs what the branch reads too: `1 - gate` is no state that the input scales."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.h(x).sigmoid()
        return (1 - gate) * x + self.f(gate * x)  # MISS structure: gated mix


@case(streams=0)
class ShiftedGates(Net):
    """A product of two varying values is no scaled state, however it is shifted."""

    def forward(self, x: Tensor) -> Tensor:
        x = (x + 1) * self.h(x).sigmoid() + self.f(x)  # MISS structure: computed from another
        x = torch.addcmul(self.b, x, self.h(x).sigmoid()) + self.f(x)  # MISS structure: computed from another
        x = torch.addcmul(self.b, x, x) + self.f(x)
        return (0.5 - x.square()) * self.a + self.f(x)  # MISS structure: computed from another


@case(streams=0)
class Lerp(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.lerp(x, self.f(x), self.h(x).sigmoid())


@case((2, 5, D), (2, 5, D), streams=0)
class GatedRecurrence(Net):
    """One step of a GRU, written out."""

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        update = (self.f(x) + self.g(state)).sigmoid()
        fresh = (self.h(x) + self.f(state)).tanh()
        return (1 - update) * fresh + update * state  # MISS structure: gated mix


# -- values that come back: `order`, `shape`


@case()
class InputInjection(Net):
    """A loop that reads the embedding again in each turn."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.n(x)
        state = start
        for layer in (self.f, self.g, self.h):
            state = state + layer(state)  # SITE x3
            state = state + start  # MISS order: injected
        return state


@case()
class PositionsThatMadeTheState(Net):
    """Queries made of the positions, which are added to them again for a branch to read: no state runs on in that sum."""

    def forward(self, positions: Tensor) -> Tensor:
        state = self.n(self.f(positions))
        query = state + positions  # MISS order: injected
        state = self.m(state + self.g(query))  # SITE
        query = state + positions  # MISS order: injected
        return state + self.h(query)  # SITE


@case(streams=3)
class UpdatesAddedAtLast(Net):
    """`x + (u + g(x + u))`: x runs on, though u is added to what is computed from the first sum."""

    def forward(self, x: Tensor) -> Tensor:
        update = self.f(x)
        inner = x + update  # SITE
        return x + (update + self.g(inner))  # SITE x2


@case(IMAGE, streams=0)
class EncoderDecoderMerge(ConvNet):
    """A U-Net that adds: both levels come back from a smaller image."""

    def setup(self) -> None:
        super().setup()
        self.bottom = nn.Sequential(nn.Conv2d(D, D, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        fine = self.f(x)
        coarse = self.g(F.max_pool2d(fine, 2))
        deep = self.bottom(F.max_pool2d(coarse, 2))
        coarse = coarse + F.interpolate(deep, scale_factor=2.0)  # MISS shape: another resolution
        return fine + F.interpolate(self.h(coarse), scale_factor=2.0)  # MISS shape: another resolution


@case(IMAGE, streams=2)
class ResidualEncoderDecoderMerge(ConvNet):
    """The same with residual blocks on each level: the blocks are sites, the merge is none."""

    def setup(self) -> None:
        super().setup()
        self.up = nn.ConvTranspose2d(D, D, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        fine = x + self.f(x)  # SITE
        coarse = self.n(F.avg_pool2d(fine, 2)).relu()
        coarse = coarse + self.g(coarse)  # SITE
        return fine + self.up(coarse)  # MISS shape: another resolution


@cases_of(__name__)
def test_refused(case: Case) -> None:
    case.check()
