"""`measure` on wrapped, frozen and several streams; the losses it takes; what it leaves untouched; the plot."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from measure_helpers import D, Net, loss_of, rewritten, seeded_input, seeded_net
from torch import Tensor, nn

import resfx
from resfx.export.errors import OutputPathError


@pytest.fixture
def net() -> Net:
    return seeded_net()


@pytest.fixture
def x() -> Tensor:
    return seeded_input()


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
        self.first, self.last = (
            nn.ModuleList(nn.Linear(D, D) for _ in range(3)),
            nn.ModuleList(nn.Linear(6, 6) for _ in range(3)),
        )
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


@pytest.mark.parametrize("changed", [False, True], ids=["plain", "rewritten"])
def test_nothing_changes(changed: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, D, 4, 4)
    net: nn.Module = Conv()
    net.norms[1].eval()
    model = resfx.rewrite(net, resfx.MultiGate(streams=2), (x,)) if changed else net
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
