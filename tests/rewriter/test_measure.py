"""`measure` against the same numbers computed by hand, on every form; what it leaves untouched; its report."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import resfx
from resfx.export.errors import OutputPathError

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
D, SITES = 12, 5
START = 1 / (1 + math.e**2)  # sigmoid(-2)


class Branch(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, 8), nn.Linear(8, D)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(F.gelu(self.fc1(self.norm(x)))))


class Net(nn.Module):
    """Pre-norm sites; the first update is added with a factor, the last one is the sum of two branches."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(dropout) for _ in range(SITES + 1))
        self.head = nn.LayerNorm(D)

    def updates(self, number: int, x: Tensor) -> Tensor:
        u = self.branches[number](x)
        return u + self.branches[SITES](x) if number == SITES - 1 else u

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.branches[0](x)
        for number in range(1, SITES - 1):
            x = x + self.branches[number](x)
        x = x + self.branches[SITES - 1](x) + self.branches[SITES](x)
        return self.head(x)


def loss_of(y: Tensor) -> Tensor:
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 4, D, dtype=torch.float64)


@functools.cache
def _rewritten(form: resfx.Form, warm: bool) -> resfx.Rewritten:
    torch.manual_seed(0)
    return resfx.rewrite(Net().double(), form, (torch.randn(2, 4, D, dtype=torch.float64),), warm_start=warm)


def rewritten(form: resfx.Form, warm: bool = False) -> resfx.Rewritten:
    """`net` in another form, with the new parameters at their start; each is captured once."""
    return copy.deepcopy(_rewritten(form, warm))


def perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("residual."):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def token_norm(value: Tensor) -> float:
    return float(value.detach().norm(dim=-1).square().mean().sqrt())


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
        assert [getattr(r, name) for r in report.sites] == [e if e is None else pytest.approx(e, rel=1e-9) for e in expected]
    assert report.loss == pytest.approx(float(loss_of(net(x))), rel=1e-12)
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
    assert [r.site for r in sites] == list(range(SITES)) * (2 if form.to_spec().startswith("scaled_loop(loops=2") else 1)
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
        (resfx.MultiGate(streams=2, gate="competitive"), False, [None] + [1 / (math.sqrt(4 / 21) * (1 + math.e**3))] * 4),
        (resfx.ScaledLoop(), False, [None] * SITES),
    ],
    ids=lambda value: value.to_spec() if isinstance(value, resfx.Form) else str(value)[:10],
)
def test_gates_at_the_start(
    net: Net, x: Tensor, form: resfx.Form, warm: bool, gates: list[float | None]
) -> None:
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
        self.down, self.up = nn.ModuleList(nn.Linear(D, 6) for _ in range(2)), nn.ModuleList(nn.Linear(6, D) for _ in range(2))
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


@pytest.mark.parametrize("form", [resfx.Standard(), resfx.Review(), resfx.MultiGate(streams=2)], ids=lambda f: f.to_spec())
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


def test_wrappers_copies_and_plain_twins(net: Net, x: Tensor) -> None:
    model = rewritten(resfx.Review())

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": 2 * self.inside(x)}

    expected = resfx.measure(model, (x,)).sites
    assert resfx.measure(copy.deepcopy(model), (x,)).sites == expected
    assert resfx.measure(torch.compile(model), (x,)).sites == expected
    assert resfx.measure(Wrapper(), (x,)).sites == expected
    twice = resfx.measure(Wrapper(), (x,), loss=lambda out: loss_of(out["y"])).sites
    once = resfx.measure(model, (x,), loss=loss_of).sites
    assert [r.gradient_norm for r in twice] == [pytest.approx(2 * r.gradient_norm) for r in once]  # type: ignore[operator]
    with pytest.raises(resfx.MeasureError, match="one by one"):
        resfx.measure(nn.Sequential(model, copy.deepcopy(model)), (x,))


class TwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.ModuleList(nn.Linear(D, D) for _ in range(3)), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.down = nn.Linear(D, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = x + layer(x)
        x = self.down(x)
        for layer in self.last:
            x = x + layer(x)
        return x


def test_several_streams() -> None:
    """Each under its own form; those that were left plain are named."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, D)
    model = resfx.rewrite(TwoStreams(), resfx.Review(), (x,), streams=0)
    report = resfx.measure(model, (x,))
    assert set(report.unmeasured) == {1}
    assert {r.stream for r in report.sites} == {0}
    assert "stream 1 was not measured" in str(report)
    report = resfx.measure(resfx.rewrite(model, resfx.DeltaAttention(), (x,)), (x,))
    assert report.forms == {0: "review", 1: "delta"}
    assert report.unmeasured == {}
    assert [r.gate_mean for r in report.of_stream(0)] == [pytest.approx(0.5)] * 3
    assert [r.weight_max for r in report.of_stream(1)] == [None, pytest.approx(1 / 2), pytest.approx(1 / 3)]
    assert report.of_stream(1)[0].cosine is None


def test_frozen_models_have_gradients_too(net: Net, x: Tensor) -> None:
    model = rewritten(resfx.Standard())
    expected = [r.gradient_norm for r in resfx.measure(model, (x,), loss=loss_of).sites]
    model.requires_grad_(False)
    with torch.no_grad():
        report = resfx.measure(model, (x,), loss=loss_of)
    assert [r.gradient_norm for r in report.sites] == [pytest.approx(e, rel=1e-9) for e in expected]


@dataclass
class Output:
    loss: Tensor | None
    y: Tensor


torch.export.register_dataclass(Output, serialized_type_name="resfx.tests.measure.Output")


class WithLoss(Net):
    def forward(self, x: Tensor, target: Tensor | None = None) -> Output:
        y = super().forward(x)
        return Output(None if target is None else F.mse_loss(y, target), y)


def test_the_loss_that_a_model_returns(x: Tensor) -> None:
    torch.manual_seed(0)
    net, target = WithLoss().double(), torch.zeros_like(x)
    model = resfx.rewrite(net, resfx.Review(), (x, target))
    own = resfx.measure(model, (x, target))
    given = resfx.measure(model, (x, target), loss=lambda out: F.mse_loss(out.y, target))
    assert own == given
    assert own.loss is not None
    with torch.no_grad():
        assert resfx.measure(model, (x, target)).sites[0].gradient_norm is None
    assert resfx.measure(net, (x,)).sites[0].gradient_norm is None


def test_losses_that_are_none(net: Net, x: Tensor) -> None:
    model = rewritten(resfx.Review())
    with pytest.raises(resfx.MeasureError, match=r"shape \(2, 4, 12\)"):
        resfx.measure(model, (x,), loss=lambda y: y)
    with pytest.raises(resfx.MeasureError, match="a float"):
        resfx.measure(model, (x,), loss=lambda y: float(y.detach().sum()))
    with pytest.raises(resfx.MeasureError, match="without detaching"):
        resfx.measure(model, (x,), loss=lambda y: y.detach().sum())
    assert "forward" not in vars(model)


class Conv(nn.Module):
    """Batch statistics, dropout, in-place activations."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(D, D, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(D) for _ in range(3))
        self.relu, self.drop = nn.ReLU(inplace=True), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            out = norm(self.drop(conv(x)))
            out += x
            x = self.relu(out)
        return x


@pytest.mark.parametrize("rewritten", [False, True], ids=["plain", "rewritten"])
def test_nothing_changes(rewritten: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, D, 4, 4)
    net: nn.Module = Conv()
    net.norms[1].eval()
    model = resfx.rewrite(net, resfx.MultiGate(streams=2), (x,)) if rewritten else net
    model.convs[0].weight.grad = torch.ones_like(model.convs[0].weight)
    state, random = copy.deepcopy(model.state_dict()), torch.random.get_rng_state()
    flags = {name: (module.training, set(vars(module))) for name, module in model.named_modules()}
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    objects = [id(t) for t in (*model.parameters(), *model.buffers())]
    report = resfx.measure(model, (x,), loss=lambda y: y.square().mean())
    assert len([r for r in report.sites if r.update_norm]) == 3
    assert torch.equal(torch.random.get_rng_state(), random)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    assert {name: (module.training, set(vars(module))) for name, module in model.named_modules()} == flags
    assert {name: len(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == objects
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == 1
    assert torch.equal(grads[0], torch.ones_like(grads[0]))


def test_it_measures_the_mode_the_model_is_in(x: Tensor) -> None:
    torch.manual_seed(0)
    model = resfx.rewrite(Net(dropout=0.5).double(), resfx.Review(), (x,))
    random = torch.random.get_rng_state()
    seen: list[Tensor] = []
    training = resfx.measure(model.train(), (x,), loss=lambda y: (seen.append(y), y.sum())[1])
    torch.random.set_rng_state(random)
    assert torch.equal(model(x), seen[0])
    evaluated = resfx.measure(model.eval(), (x,))
    assert training.sites[0].update_norm != evaluated.sites[0].update_norm


def test_half_precision_is_measured_wide(net: Net, x: Tensor) -> None:
    exact = resfx.measure(net, (x,)).sites
    half = resfx.measure(net.bfloat16(), (x.bfloat16(),)).sites
    assert [r.stream_norm for r in half] == [pytest.approx(r.stream_norm, rel=2e-2) for r in exact]


def test_plot(net: Net, x: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    report = resfx.measure(rewritten(resfx.MultiGate(streams=2)), (x,), loss=loss_of)
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(resfx.PlotError, match=r"\.png"):
        report.plot(tmp_path / "report.nonsense")
    with pytest.raises(OutputPathError, match="does not exist"):
        report.plot(tmp_path / "missing" / "report.png")
    with pytest.raises(resfx.PlotError, match="nothing to draw"):
        resfx.Report((), {}, {}).plot(tmp_path / "empty.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(resfx.PlotError, match=r"resfx\[plot\]"):
        report.plot(tmp_path / "other.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.png"]
