"""Architectures as their papers write them, in short: what is a site, what is none, and how many streams there are."""

from __future__ import annotations

import math

import pytest
import torch
from new_parameters import perturb
from patterns_marks import CASES, Case, ConvNet, D, Net, case, cases_of
from torch import Tensor, nn
from torch.nn import functional as F

import resfx

TOKENS = (2, 6, D)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


@case(TOKENS, TOKENS, (2, D), streams=2)
class JointBlocks(Net):
    """A multimodal DiT: two streams, one attention over both, gates from a step embedding; the last text update is left out."""

    def setup(self) -> None:
        self.steps = nn.ModuleList(nn.Linear(D, 6 * D) for _ in range(4))
        self.maps = nn.ModuleList(nn.Linear(D, D) for _ in range(6))

    def forward(self, image: Tensor, text: Tensor, step: Tensor) -> Tensor:
        for block in range(2):
            shift, scale, gate, shift2, scale2, gate2 = self.steps[block](F.silu(step))[:, None].chunk(6, -1)
            _, _, text_gate, *_ = self.steps[2 + block](F.silu(step))[:, None].chunk(6, -1)
            both = torch.cat([self.n(image) * (1 + scale) + shift, self.n(text)], 1)
            mixed = attend(self.maps[0](both), self.maps[1](both), self.maps[2](both))
            image = image + gate * self.maps[3](mixed[:, :6])  # SITE x2
            image = image + gate2 * self.f(self.m(image) * (1 + scale2) + shift2)  # SITE x2
            if block == 0:
                text = text + text_gate * self.maps[4](mixed[:, 6:])  # SITE
                text += self.g(self.m(text))  # SITE
        return image


@case((2, 36, D))
class ShiftedWindows(Net):
    """Swin: windows of a padded and rolled image."""

    def windows(self, x: Tensor) -> Tensor:
        return x.view(2, 2, 4, 2, 4, D).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, D)

    def image(self, x: Tensor) -> Tensor:
        return x.view(2, 2, 2, 4, 4, D).permute(0, 1, 3, 2, 4, 5).reshape(2, 8, 8, D)

    def forward(self, x: Tensor) -> Tensor:
        for shift in (0, 2):
            shortcut = x
            x = F.pad(self.n(x).view(2, 6, 6, D), (0, 0, 0, 2, 0, 2)).roll((-shift, -shift), (1, 2))
            x = self.windows(x)
            x = self.image(attend(self.f(x), self.g(x), self.h(x))).roll((shift, shift), (1, 2))
            x = shortcut + x[:, :6, :6].contiguous().view(2, 36, D)  # SITE x2
            x = x + self.f(self.m(x))  # SITE x2
        return x


@case((2, 3, 5, D), (2, 5, 5, D), streams=2)
class PairAndSequences(Net):
    """Evoformer: the pair biases the sequences' attention; the first outer product is of sequences that have seen the pair."""

    def setup(self) -> None:
        self.bias, self.left, self.outer = nn.Linear(D, 1), nn.Linear(D, 2), nn.Linear(4, D)

    def forward(self, rows: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(2):
            h = self.n(rows)
            bias = self.bias(pair)[:, None, ..., 0]
            scores = self.f(h) @ self.g(h).mT + bias  # MISS structure: computed from another
            rows = rows + scores.softmax(-1) @ self.h(h)  # SITE x2
            left = self.left(self.m(rows))
            product = torch.einsum("bsic,bsjd->bijcd", left, left).flatten(-2)
            pair = pair + self.outer(product)  # SITE x2
            pair = pair + self.g(self.m(pair))  # SITE x2
        return rows, pair


@case((2, 12, D), streams=2)
class MergedTokens(Net):
    """ToMe: the sequence is halved between attention and MLP, and the stream ends there."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.n(x)
        x = x + attend(self.f(h), self.g(h), h)  # SITE
        pair = (x[:, ::2] @ x[:, 1::2].mT).argmax(-1)[..., None].expand(-1, -1, D)
        x = x[:, 1::2].scatter_reduce(1, pair, x[:, ::2], reduce="mean")
        return x + self.h(self.m(x))  # SITE


@case()
class WeightedAverages(Net):
    """DenseFormer: after each block a learned average of all states so far."""

    def setup(self) -> None:
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(n + 2)) for n in range(3))

    def forward(self, x: Tensor) -> Tensor:
        states = [x]
        for layer, weights in zip((self.f, self.g, self.h), self.weights, strict=True):
            states.append(x + layer(self.n(x)))  # SITE x3
            x = sum(weight * state for weight, state in zip(weights, states, strict=True))  # MISS order: running state
        return x


@case((2, D, 9))
class CollectedSkips(Net):
    """WaveNet: each block also gives something to a sum that no block reads."""

    def setup(self) -> None:
        self.convs, self.ins, self.outs = (nn.ModuleList(nn.Conv1d(D, D, 1) for _ in range(3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips = torch.zeros_like(x)
        for conv, into, out in zip(self.convs, self.ins, self.outs, strict=True):
            h = conv(x).tanh() * conv(x).sigmoid()
            skips = skips + out(h)  # MISS structure: computed from another
            x = (x + into(h)) / math.sqrt(2)  # SITE x3
        return skips + x  # MISS structure: computed from another


@case(streams=0)
class HyperConnections(Net):
    """Several copies of the state, mixed by a learned matrix: the skip is a projection."""

    def setup(self) -> None:
        self.mix, self.spread = nn.Parameter(torch.rand(2, 3)), nn.Parameter(torch.rand(2))

    def forward(self, x: Tensor) -> Tensor:
        copies = x[:, :, None].expand(-1, -1, 2, -1)
        for layer in (self.f, self.g):
            mixed = torch.einsum("bsnd,nm->bsmd", copies, self.mix)
            update = layer(self.n(mixed[:, :, 0]))
            copies = torch.einsum("bsd,n->bsnd", update, self.spread) + mixed[:, :, 1:]  # MISS structure: not put back
        return copies.sum(2)


@case()
class StartAndValuesAgain(Net):
    """The first embedding is mixed in before each block, and the first values into all later ones."""

    def setup(self) -> None:
        self.lambdas = nn.Parameter(torch.rand(3, 3))
        self.values = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        start = x = self.n(x)
        first: Tensor | None = None
        for weights, values in zip(self.lambdas, self.values, strict=True):
            x = weights[0] * x + weights[1] * start
            v = values(x)
            first = v if first is None else first
            v = v + weights[2] * first
            x = x + attend(self.f(x), self.g(x), v)  # SITE x3
        return x


@case((1, D, 8, 8), (1, D), streams=2)
class TimeEmbeddings(ConvNet):
    """A diffusion U-Net: an embedding is added inside of the branch, and the levels meet in a cat."""

    def setup(self) -> None:
        super().setup()
        self.time, self.join = nn.Linear(D, D), nn.Conv2d(2 * D, D, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.f(x) + self.time(F.silu(time))[:, :, None, None]  # MISS structure: computed from another
        x = x + self.g(h)  # SITE
        low = F.avg_pool2d(x, 2)
        low = low + self.g(self.f(low))  # SITE
        return self.join(torch.cat([F.interpolate(low, scale_factor=2.0), x], 1))


@case(TOKENS, (2, 4, D), streams=6)
class QueriesAndText(Net):
    """Q-Former: one attention over queries and text, then a branch for each part."""

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        for layer in (self.f, self.g):
            x = self.n(layer(x).softmax(-1) @ layer(x).mT @ layer(x) + x)  # SITE x2
            queries, text = x[:, :3], x[:, 3:]
            queries = self.m(attend(self.h(queries), image, image) + queries)  # SITE x2
            queries = self.n(self.f(queries) + queries)  # SITE x2
            text = self.n(self.g(text) + text)  # SITE x2
            x = torch.cat([queries, text], 1)
        return x


@case()
class MacaronWithConvolution(Net):
    """Conformer: half steps of an MLP around attention and convolution, with a norm at the end of the block."""

    def setup(self) -> None:
        self.conv, self.drop = nn.Conv1d(D, 2 * D, 3, padding=1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + 0.5 * self.drop(self.f(self.n(x)))  # SITE x2
            x = x + attend(self.g(x), self.h(x), self.n(x))  # SITE x2
            x = x + F.glu(self.conv(self.m(x).mT), 1).mT  # SITE x2
            x = self.n(x + 0.5 * self.f(self.m(x)))  # SITE x2
        return x


@case()
class ScalesOfTheSkip(Net):
    """DeepNorm, ResScale and magnitude-preserving sums."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.n(x * 1.7 + self.f(x))  # SITE
        x = self.a * x + self.m(self.g(self.n(x)))  # SITE
        return x.lerp(self.h(x), 0.3) / math.sqrt(0.7**2 + 0.3**2)  # SITE


@case(TOKENS)
class LinearBiases(Net):
    """ALiBi: distances with a slope for each head, learned here, are added to the scores."""

    def setup(self) -> None:
        self.slopes = nn.Parameter(torch.rand(2, 1, 1))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = (places[:, None] - places).abs()
        for layer in (self.f, self.g):
            q, k = self.heads(layer(x)), self.heads(self.h(x))
            scores = q @ k.mT - self.slopes * distance
            x = x + (scores.softmax(-1) @ k).transpose(1, 2).flatten(2)  # SITE x2
        return x


@case(TOKENS)
class ParallelAdapters(Net):
    """An adapter beside the MLP is a second branch; one inside of a linear map belongs to it."""

    def setup(self) -> None:
        self.down, self.up = nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(self.n(x)) + 0.5 * self.up(self.down(x).relu())  # SITE
        h = self.m(x)
        mapped = self.g[0](h) + self.up(self.down(h))  # MISS structure: computed from another
        return x + self.h(mapped)  # SITE


@case(streams=2)
class TwoAccumulators(Net):
    """ResiDual: all that a post-norm stream adds is summed beside it too. No branch reads that sum before it's whole: one site."""

    def forward(self, x: Tensor) -> Tensor:
        update = self.f(x)
        total = x + update
        x = self.n(x + update)  # SITE
        for layer in (self.g, self.h):
            update = layer(x)
            total = total + update  # SITE
            x = self.n(x + update)  # SITE x2
        return x + self.m(total)  # MISS structure: computed from another


@case((2, D, 4, 4), streams=0)
class OutputSkips(ConvNet):
    """StyleGAN2's generator: what each resolution says about the image is summed; no layer reads the sum."""

    def setup(self) -> None:
        super().setup()
        self.images = nn.ModuleList(nn.Conv2d(D, 3, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        image = self.images[0](x)
        for layer, to_image in zip((self.f, self.g), self.images[1:], strict=True):
            x = layer(F.interpolate(x, scale_factor=2.0))
            image = F.interpolate(image, scale_factor=2.0) + to_image(x)  # MISS structure: computed from another
        return image


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()


REWRITTEN = [ShiftedWindows, PairAndSequences, StartAndValuesAgain, TwoAccumulators]


@pytest.mark.parametrize("model", REWRITTEN, ids=lambda model: model.__name__)
def test_rewritten(model: type[nn.Module]) -> None:
    case = next(case for case in CASES[__name__] if case.model is model)
    plain, inputs = model().eval(), case.inputs()
    result = resfx.rewrite(plain, resfx.DeltaAttention(), inputs, warm_start=True).eval()
    assert torch.allclose(_joined(result(*inputs)), _joined(plain(*inputs)), atol=1e-5)
    assert result.residual_map.refused == {}
    perturb(result)
    assert not torch.allclose(_joined(result(*inputs)), _joined(plain(*inputs)), atol=1e-3)


def _joined(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([part.flatten() for part in output]) if isinstance(output, tuple) else output.flatten()


def test_an_adapter_beside_the_branch_is_a_branch() -> None:
    case = next(case for case in CASES[__name__] if case.model is ParallelAdapters)
    assert [len(site.branches) for site in case.find().sites] == [2, 1]


def test_a_sum_of_all_updates_is_one_site_of_many_branches() -> None:
    case = next(case for case in CASES[__name__] if case.model is TwoAccumulators)
    assert [[len(site.branches) for site in stream.sites] for stream in case.find().streams] == [[1, 1, 1], [3]]
