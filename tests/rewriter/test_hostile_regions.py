"""Values that cross the border of a no_grad region: gradients are the original's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from capture_helpers import assert_same, fold_model
from torch import nn
from torch._export.wrappers import allow_in_pre_dispatch_graph
from torch.utils.checkpoint import checkpoint

import resfx


class HandedThrough(nn.Module):
    """A region reads the state by a submodule; the state lives on after it."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g, self.h = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.f(x)
        with torch.no_grad():
            q = self.g(x)
        return x + self.h(x) * q


@pytest.mark.parametrize("mode", [True, False])
def test_a_value_read_in_a_region_keeps_its_gradient_outside(mode: bool) -> None:
    model, x = HandedThrough(), torch.randn(2, 5, 8)
    graphed, _ = fold_model(model, (x,))
    assert_same(model, graphed, (x,))
    rewritten = resfx.rewrite(model, resfx.Standard(), (x,))
    for module in (model.train(mode), rewritten.train(mode)):
        module.zero_grad()
        module(x).sum().backward()
    torch.testing.assert_close(model.f.weight.grad, rewritten.get_submodule("f").weight.grad)
    assert rewritten.get_submodule("g").weight.grad is None


class Frozen(nn.Module):
    """Gradients off in ways that the export does not keep."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "inference":
            with torch.inference_mode():
                s = self.f(x).mean()
            return x + self.g(x) * s.clone()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                x = x + self.f(x)
            return x + self.g(x)


@pytest.mark.parametrize("kind", ["autocast", "inference"])
def test_what_ran_without_gradients_gets_none(kind: str) -> None:
    model, x = Frozen(kind), torch.randn(2, 5, 8)
    graphed, _ = fold_model(model, (x,))
    assert_same(model, graphed, (x,))
    rewritten = resfx.rewrite(model, resfx.Standard(), (x,))
    for mode in (True, False):
        rewritten.train(mode)(x).sum().backward()
        assert rewritten.get_submodule("f").weight.grad is None
        assert rewritten.get_submodule("g").weight.grad is not None


class Overwritten(nn.Module):
    """Writes to the state while gradients are off: autograd does not see it, so the gradient is that of the old state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.f, self.g = kind, nn.Linear(8, 8), nn.Linear(8, 8)

    def write(self, x: torch.Tensor) -> None:
        if self.kind == "mul":
            x.mul_(2)
        if self.kind == "branch":
            x += self.g(x)
            x.mul_(x)
        if self.kind == "clamp":
            x.clamp_(-0.5, 0.5)
        if self.kind in ("slice", "autocast"):
            x[:, 0].mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.f(x)
        with torch.autocast("cpu", enabled=self.kind == "autocast"), torch.no_grad():
            self.write(x)
        return x + self.g(x)


@pytest.mark.parametrize("kind", ["mul", "branch", "clamp", "slice", "autocast"])
def test_a_write_without_gradients(kind: str) -> None:
    model, x = Overwritten(kind), torch.randn(2, 5, 8)
    graphed, _ = fold_model(model, (x,))
    assert_same(model, graphed, (x,))
    rewritten = resfx.rewrite(model, resfx.Standard(), (x,))
    compiled = torch.compile(rewritten, fullgraph=True, backend="aot_eager")
    gradients = []
    for module in (model, rewritten, compiled):
        module.zero_grad()
        module(x).sin().sum().backward()
        gradients.append([module.get_parameter(name).grad for name in ("f.weight", "g.weight")])
    torch.testing.assert_close(gradients[1], gradients[0])
    torch.testing.assert_close(gradients[2], gradients[0])


class Checkpointed(nn.Module):
    """A checkpointed region in a checkpointed region, as a stage of layers that are checkpointed each."""

    def __init__(self, *reentrant: bool) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)
        self.outer, self.inner = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.stage, x, use_reentrant=self.outer)
        return result

    def stage(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda y: y + self.f(y), x, use_reentrant=self.inner)
        return x + self.g(x)


@pytest.mark.parametrize("reentrant", [(False, False), (False, True), (True, False), (True, True)])
def test_a_checkpointed_region_in_another_keeps_its_gradients(reentrant: tuple[bool, bool]) -> None:
    model, x = Checkpointed(*reentrant), torch.randn(2, 5, 8, requires_grad=True)
    rewritten = resfx.rewrite(model, resfx.Standard(), (x,))
    found = []
    for module in (model, rewritten):
        module.zero_grad()
        module(x).square().sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    torch.testing.assert_close(found[1], found[0])


class Steep(torch.autograd.Function):
    """Stays one call in an export, by `flat_apply`; its gradient is its own."""

    @classmethod
    @allow_in_pre_dispatch_graph
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args)  # type: ignore[no-untyped-call]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 100, None


class Custom(nn.Module):
    def __init__(self, gradients: bool) -> None:
        super().__init__()
        self.f, self.g, self.gradients = nn.Linear(8, 8), nn.Linear(8, 8), gradients

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.f(x)
        with torch.set_grad_enabled(self.gradients):
            scale = Steep.apply(x, 0.5)
        return x + self.g(x) * scale


@pytest.mark.parametrize("gradients", [True, False])
def test_a_function_with_a_backward_of_its_own(gradients: bool) -> None:
    model, x = Custom(gradients), torch.randn(2, 5, 8)
    graphed, _ = fold_model(model, (x,))
    assert_same(model, graphed, (x,))
    rewritten = resfx.rewrite(model, resfx.Standard(), (x,))
    assert_same(rewritten, copy.deepcopy(rewritten), (x,))
    assert_same(rewritten, resfx.revert(rewritten, streams=[0]), (x,))
