"""Branches that a train-only operation changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import resfx


class Branch(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.f, self.kind = nn.Linear(8, 8), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.f(x)
        if self.training and self.kind == "noise":
            y = y + 0.1 * torch.rand(y.shape)
        if self.training and self.kind == "depth":
            y = y * torch.empty(y.shape[0], 1, 1).bernoulli_(0.5) / 0.5
        if self.training and self.kind == "default":
            y = y * torch.empty(y.shape[0], 1, 1).bernoulli_()
        return x + y


@pytest.mark.parametrize("kind", ["noise", "depth", "default"])
def test_train_only_operations_on_the_branch(kind: str) -> None:
    model, x = Branch(kind), torch.randn(4, 5, 8)
    rewritten = resfx.rewrite(model, resfx.Standard(), (x,))
    for mode in (True, False):
        torch.manual_seed(0)
        expected = model.train(mode)(x)
        torch.manual_seed(0)
        assert torch.equal(rewritten.train(mode)(x), expected)
    assert len(rewritten.residual_map.sites) == 1


class SkipDropout(nn.Module):
    """Dropout on the state, which the branch reads before it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.f, self.g, self.kind = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), kind
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.drop = nn.Sequential(nn.Dropout(0.2), nn.Dropout(0.1))

    def dropped(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "module":
            return self.drop(x)
        if self.kind == "twice":
            return F.dropout(F.dropout(x, 0.2, self.training), 0.1, self.training)
        if self.kind == "alpha":
            return F.alpha_dropout(x, 0.2, self.training)
        return F.dropout(x, 0.2, self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "glue":
            return F.dropout(x, 0.2, self.training) + x @ self.weight
        x = self.norm(x)
        x = self.dropped(x) + self.f(x)
        return self.dropped(x) + self.g(x)


@pytest.mark.parametrize("frontend", ["export", "fx"])
@pytest.mark.parametrize("kind", ["function", "twice", "module", "alpha", "glue"])
def test_dropout_on_the_skip(kind: str, frontend: str) -> None:
    model, x = SkipDropout(kind), torch.randn(2, 5, 8)
    for form in (resfx.Standard(), resfx.DeltaAttention()):
        rewritten = resfx.rewrite(model, form, (x,), warm_start=form != resfx.Standard(), frontend=frontend)
        for mode in (True, False):
            grads = []
            for module in (model.train(mode), rewritten.train(mode)):
                module.zero_grad()
                torch.manual_seed(0)
                output = module(x)
                output.square().sum().backward()
                grads.append((output.detach(), *(module.get_parameter(n).grad for n, _ in model.named_parameters())))
            torch.testing.assert_close(grads[1], grads[0])
        assert len(rewritten.residual_map.sites) == (1 if kind == "glue" else 2)


class SeveralSteps(nn.Module):
    """In train mode the state is scaled at random, then dropped out."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.f(x)
        if self.training:
            x = x * torch.rand(())
        x = F.dropout(x, 0.2, self.training)
        return x + self.g(x)


def test_several_steps_that_follow_the_mode_are_refused() -> None:
    with pytest.raises(resfx.ResfxError, match=r"several steps on the state at `root`, .*test_hostile_modes.py:96"):
        resfx.rewrite(SeveralSteps(), resfx.Standard(), (torch.randn(2, 5, 8),))


@pytest.mark.parametrize("copy", [True, False])
def test_a_rewrite_inside_inference_mode_can_be_trained(copy: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Branch("plain"), Branch("plain"))
    with torch.inference_mode():
        x = torch.randn(2, 5, 8)
        assert len(resfx.find(model, (x,)).sites) == 2
        result = resfx.rewrite(model, resfx.DeltaAttention(), (x,), copy=copy, warm_start=True)
        torch.testing.assert_close(result(x), model(x))
    result(x.clone()).sum().backward()
    assert all(parameter.grad is not None for parameter in result.parameters())


def test_a_model_made_inside_inference_mode_is_copied_or_refused() -> None:
    with torch.inference_mode():
        model = nn.Sequential(Branch("plain"), Branch("plain"))
    with pytest.raises(resfx.CaptureError, match=r"`0\.f\.weight` was made inside torch\.inference_mode\(\)"):
        resfx.rewrite(model, resfx.DeltaAttention(), (torch.randn(2, 5, 8),), copy=False)
    assert len(resfx.rewrite(model, resfx.DeltaAttention(), (torch.randn(2, 5, 8),)).residual_map.sites) == 2


class OtherWay(nn.Module):
    """A leaf whose last line is another one in train mode, where it may depend on values as well."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.f, self.g, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.f(x).relu()
        if self.training:
            z = torch.cat(torch.split(self.g(y), 1, dim=1), dim=1)
            return (-z if self.kind == "values" and x.sum() > 0 else z), y
        return self.g(y) * 0.5, y


class AroundOtherWays(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OtherWay(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            z, y = layer(x)
            x = x + F.dropout(z, 0.2, self.training) + F.dropout(y, 0.2, self.training)
        return x


@pytest.mark.parametrize("kind", ["shapes", "values"])
def test_a_leaf_that_goes_another_way_in_train_mode(kind: str) -> None:
    model, x = AroundOtherWays(kind), torch.randn(2, 5, 8)
    rewritten = resfx.rewrite(model, resfx.Standard(), (x,))
    for mode in (True, False):
        for value in (x, -x):
            outputs = []
            for module in (model.train(mode), rewritten.train(mode)):
                torch.manual_seed(0)
                outputs.append(module(value))
            assert torch.equal(*outputs)
