"""`measure` against the same numbers computed by hand, on every form."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F
from measure_helpers import SITES, D, Net, loss_of, perturb, rewritten, seeded_input, seeded_net, token_norm
from torch import Tensor, nn

import resfx

FORMS = [
    resfx.Standard(),
    resfx.DeltaAttention(),
    resfx.DeltaAttention(granularity="block", block_size=2, gate="vector", null_source=True),
    resfx.AttentionResidual(),
    resfx.AttentionResidual(granularity="block", block_size=2),
    resfx.MultiGate(streams=2),
    resfx.MultiGate(streams=2, gate="competitive"),
    resfx.Review(),
    resfx.Highway(convex=True),
    resfx.ScaledLoop(),
    resfx.ScaledLoop(loops=2, learnable=True),
]
START = 1 / (1 + math.e**2)  # sigmoid(-2)


@pytest.fixture
def net() -> Net:
    return seeded_net()


@pytest.fixture
def x() -> Tensor:
    return seeded_input()


def by_hand(net: Net, x: Tensor) -> dict[str, list[float | None]]:
    """States, updates and the gradients in the updates of the plain model, in eager mode."""
    states, updates, h = [], [], x
    for number in range(SITES):
        u = net.updates(number, h) * (0.5 if number == 0 else 1.0)
        u.retain_grad()
        states.append(h)
        updates.append(u)
        h = h + u
    loss_of(net.head(h)).backward()
    pairs = itertools.pairwise(update.detach().flatten() for update in updates)
    net.zero_grad()
    return {
        "stream_norm": [token_norm(state) for state in states],
        "update_norm": [token_norm(update) for update in updates],
        "cosine": [None, *(float(F.cosine_similarity(a, b, 0)) for a, b in pairs)],
        "gradient_norm": [float(update.grad.norm()) for update in updates],  # type: ignore[union-attr]
    }


def test_plain_model(net: Net, x: Tensor) -> None:
    report = resfx.measure(net, (x,), loss=loss_of)
    assert [reading.site for reading in report.sites] == list(range(SITES))
    for name, expected in by_hand(net, x).items():
        assert [getattr(r, name) for r in report.sites] == [
            e if e is None else pytest.approx(e, rel=1e-9) for e in expected
        ]
    assert report.loss == pytest.approx(loss_of(net(x)).item(), rel=1e-12)
    assert report.forms == {0: "standard"}
    assert all(r.weight_max is None and r.gate_mean is None for r in report.sites)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.to_spec())
def test_every_form(net: Net, x: Tensor, form: resfx.Form) -> None:
    """Every site has its numbers, and the run that was measured is the model's own."""
    model = rewritten(form)
    perturb(model)
    seen: list[Tensor] = []
    report = resfx.measure(model, (x,), loss=lambda y: (seen.append(y), loss_of(y))[1])
    assert torch.equal(seen[0], model(x))
    sites = [r for r in report.sites if isinstance(r.site, int)]
    assert [r.site for r in sites] == list(range(SITES)) * (
        2 if form.to_spec().startswith("scaled_loop(loops=2") else 1
    )
    for reading in sites:
        assert reading.stream_norm > 0  # type: ignore[operator]
        assert reading.update_norm > 0  # type: ignore[operator]
        assert reading.gradient_norm > 0  # type: ignore[operator]
        assert reading.source.endswith(".py:" + reading.source.rsplit(":", 1)[1])
    assert all(-1 <= r.cosine <= 1 for r in sites[1:])  # type: ignore[operator]
    for r in report.sites:
        if r.weight_max is not None:
            assert 1 / r.sources <= r.weight_max <= 1  # type: ignore[operator]
            assert 0 <= r.weight_entropy <= math.log(r.sources) + 1e-12  # type: ignore[operator, arg-type]
    assert str(report).count("\n") >= len(report.sites)
    assert json.loads(json.dumps(report.to_dict()))["sites"][0]["site"] == 0


def routed(sources: list[Tensor], query: Tensor, key_norm: Tensor) -> tuple[float, float, Tensor]:
    keys = torch.stack([F.rms_norm(v, (D,), eps=1e-6) * key_norm for v in sources])
    weights = (keys * query).sum(-1).softmax(0)
    entropy = -(weights * weights.log()).sum(0).mean()
    return float(weights.amax(0).mean()), float(entropy), (weights[..., None] * torch.stack(sources)).sum(0)


def test_delta_by_hand(net: Net, x: Tensor) -> None:
    model = rewritten(resfx.DeltaAttention())
    perturb(model)
    own, h, sources = dict(model.named_parameters()), x, [x]
    for reading in resfx.measure(model, (x,)).sites:
        number, read = reading.site, h
        if number > 0:
            queries = [own[f"residual.0.{number}.{name}"] for name in ("query", "key_norm")]
            largest, entropy, mixed = routed(sources, *queries)
            assert (reading.weight_max, reading.weight_entropy) == (pytest.approx(largest), pytest.approx(entropy))
            assert reading.sources == len(sources)
            read = h + mixed
        u = net.updates(number, read) * (0.5 if number == 0 else 1.0)
        assert reading.stream_norm == pytest.approx(token_norm(h), rel=1e-9)
        assert reading.update_norm == pytest.approx(token_norm(u), rel=1e-9)
        h, sources = h + u, [*sources, u]


def test_attention_residual_by_hand(net: Net, x: Tensor) -> None:
    """There is no state: the stream norm is that of what the branch reads. The last read is the end's own."""
    model = rewritten(resfx.AttentionResidual())
    perturb(model)
    own, sources = dict(model.named_parameters()), [x]
    readings = resfx.measure(model, (x,)).sites
    assert [r.site for r in readings] == [*range(SITES), "final"]
    for reading in readings:
        read = x
        if reading.site != 0:
            queries = [own[f"residual.0.{reading.site}.{name}"] for name in ("query", "key_norm")]
            largest, entropy, read = routed(sources, *queries)
            assert (reading.weight_max, reading.weight_entropy) == (pytest.approx(largest), pytest.approx(entropy))
        if reading.site == "final":
            assert reading.update_norm is None
            continue
        assert reading.stream_norm == pytest.approx(token_norm(read), rel=1e-9)
        u = net.updates(reading.site, read) * (0.5 if reading.site == 0 else 1.0)  # type: ignore[arg-type]
        assert reading.update_norm == pytest.approx(token_norm(u), rel=1e-9)
        sources.append(u)


@pytest.mark.parametrize(
    ("form", "warm", "gates"),
    [
        (resfx.Review(), False, [0.5] * SITES),
        (resfx.Review(), True, [1.0] * SITES),
        (resfx.Highway(convex=True), False, [0.5] * SITES),
        (resfx.DeltaAttention(gate="scalar"), False, [None] + [START] * 4),
        (FORMS[2], False, [None] + [START] * 4),
        (resfx.DeltaAttention(gate="alpha"), False, [None] + [0.0] * 4),
        (resfx.DeltaAttention(), True, [None] * SITES),
        (resfx.MultiGate(streams=2), False, [None] + [1 / (math.sqrt(4 / 21) * (1 + math.e**3))] * 4),
        (
            resfx.MultiGate(streams=2, gate="competitive"),
            False,
            [None] + [1 / (math.sqrt(4 / 21) * (1 + math.e**3))] * 4,
        ),
        (resfx.ScaledLoop(), False, [None] * SITES),
    ],
    ids=lambda value: value.to_spec() if isinstance(value, resfx.Form) else str(value)[:10],
)
def test_gates_at_the_start(net: Net, x: Tensor, form: resfx.Form, warm: bool, gates: list[float | None]) -> None:
    """A form's gates at their initial values; the warm start's own blend is no gate of the form."""
    readings = resfx.measure(rewritten(form, warm), (x,)).sites
    assert [r.gate_mean for r in readings] == [g if g is None else pytest.approx(g, rel=1e-9) for g in gates]
    if isinstance(form, resfx.MultiGate):
        pools = [min(site + 2, form.streams) for site in range(SITES)]
        assert [r.weight_max for r in readings] == [pytest.approx(1 / n) for n in pools]
        assert [r.weight_entropy for r in readings] == [pytest.approx(math.log(n)) for n in pools]


def test_repeated_bodies(net: Net, x: Tensor) -> None:
    model = rewritten(resfx.ScaledLoop(loops=2, learnable=True))
    readings = resfx.measure(model, (x,), loss=loss_of).sites
    assert [(r.loop, r.site) for r in readings] == [((k,), site) for k in range(2) for site in range(SITES)]
    h = x
    for reading in readings:
        u = net.updates(reading.site, h) * (0.5 if reading.site == 0 else 1.0)  # type: ignore[arg-type]
        assert reading.stream_norm == pytest.approx(token_norm(h), rel=1e-9)
        assert reading.update_norm == pytest.approx(token_norm(u), rel=1e-9)
        h = h + u / (2 * math.sqrt(SITES))


class Nested(nn.Module):
    """A residual whose branch ends as an inner residual of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = (
            nn.ModuleList(nn.Linear(D, 6) for _ in range(2)),
            nn.ModuleList(nn.Linear(6, D) for _ in range(2)),
        )
        self.inner = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.outer = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            v = self.down[i](x)
            v = v + self.inner[2 * i](v)
            v = v + self.inner[2 * i + 1](v)
            x = x + self.up[i](v)
            w = self.outer[2 * i](x)
            w = w + self.outer[2 * i + 1](w)
            x = x + w
        return x


@pytest.mark.parametrize(
    "form", [resfx.Standard(), resfx.Review(), resfx.MultiGate(streams=2)], ids=lambda f: f.to_spec()
)
def test_nested_streams(x: Tensor, form: resfx.Form) -> None:
    """An update that ends an inner stream is read as the outer stream gets it, whatever the inner one was rewritten to."""
    torch.manual_seed(0)
    model = resfx.rewrite(Nested().double(), form, (x,))
    perturb(model)
    report = resfx.measure(model, (x,), loss=loss_of)
    found = resfx.find(Nested().double(), (x,))
    assert len(found.streams) > 1
    for stream in found.streams:
        readings = [r for r in report.of_stream(stream.index) if isinstance(r.site, int)]
        assert [r.site for r in readings] == [site.index for site in stream.sites]
        assert all(r.update_norm and r.stream_norm and r.gradient_norm for r in readings)


def test_slices_and_broadcast() -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)

        def branch(self, x: Tensor) -> Tensor:
            return self.g(self.norm(x).mean(1, keepdim=True))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.cat([x[:, :1] + self.f(x[:, :1]), x[:, 1:]], 1)
            return x + self.branch(x)

    torch.manual_seed(0)
    net, x = Sliced(), torch.randn(3, 5, D)
    readings = resfx.measure(net, (x,), loss=loss_of).sites
    after = torch.cat([x[:, :1] + net.f(x[:, :1]), x[:, 1:]], 1)
    expected = [net.f(x[:, :1]), net.branch(after).expand_as(x)]
    assert [r.update_norm for r in readings] == [pytest.approx(token_norm(u), rel=1e-5) for u in expected]
    assert [r.stream_norm for r in readings] == [pytest.approx(token_norm(h), rel=1e-5) for h in (x, after)]
    assert readings[0].gradient_norm > 0  # type: ignore[operator]
    assert readings[1].gradient_norm is None  # the branch's value is smaller than the update
    assert readings[1].cosine is None
