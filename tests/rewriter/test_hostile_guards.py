"""What a result has to survive after the rewrite: other dtypes, and the original's own train()."""

from __future__ import annotations

import copy
from typing import Self

import pytest
import torch
from torch import nn

import resfx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.f(x)


X = torch.randn(2, 5, 8)


@pytest.mark.parametrize("frontend", ["export", "fx"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_inputs_follow_the_dtype_of_the_result(dtype: torch.dtype, frontend: str) -> None:
    model = Net()
    result = resfx.rewrite(model, resfx.Standard(), (X,), frontend=frontend)
    wanted = copy.deepcopy(model).to(dtype)(X.to(dtype))
    got = result.to(dtype)(X.to(dtype))
    assert got.dtype == dtype
    assert torch.equal(got, wanted)
    compiled = torch.compile(result, fullgraph=True, backend="eager")
    assert torch.equal(compiled(X.to(dtype)), wanted)
    with pytest.raises(resfx.GuardError, match=r"torch\.int64"):
        result(X.long())
    with pytest.raises(resfx.GuardError, match="at capture it was"):
        result.float()(X.to(dtype))


class Frozen(nn.Module):
    """Keeps its dropout in eval mode, whatever is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.drop.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.f(x))


def test_train_of_the_original_is_followed() -> None:
    model = Frozen()
    result = resfx.rewrite(model, resfx.Standard(), (X,))
    for module in (result, copy.deepcopy(result)):
        module.train()
        assert module.training
        assert module.get_submodule("f").training
        assert not module.get_submodule("drop").training
        assert torch.equal(module(X), model.train()(X))
        module.eval()
        assert not any(child.training for child in module.modules())


class OneApart(nn.Module):
    """Goes another way where the batch, or the sequence, is 1."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.f, self.g, self.axis = nn.Linear(8, 8), nn.Linear(8, 8), axis

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[self.axis] == 1:
            return x + self.g(x * 2)
        return x + self.f(x)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_size_of_1_that_the_model_treats_apart(axis: int) -> None:
    model, shape = OneApart(axis), [4, 4, 8]
    shape[axis] = 1
    x = torch.randn(shape)
    found = resfx.find(model, (x,))
    assert [site.source.rpartition(":")[2] for site in found.sites] == ["82"]
    assert any("treats a size of 1 apart" in note for note in found.notes)
    assert any(f"fixed by the model: x[{axis}]" in note for note in found.notes)
    rewritten = resfx.rewrite(model, resfx.Standard(), (x,))
    assert torch.equal(rewritten(x), model(x))
    assert any("treats a size of 1 apart" in note for note in rewritten.residual_map.notes)
    with pytest.raises(resfx.GuardError, match=f"axis {axis}"):
        rewritten(torch.randn(4, 4, 8))


class WideNorm(nn.Module):
    """Computes in float32 and gives back the dtype it got: in a float32 model both casts do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.contiguous().float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


class WideNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.f, self.norm2, self.g = WideNorm(), nn.Linear(8, 8), WideNorm(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.f(self.norm1(x))
        return x + self.g(self.norm2(x))


def test_a_norm_that_casts_stays_a_leaf() -> None:
    model = WideNormNet()
    result = resfx.rewrite(model, resfx.Standard(), (X,))
    called = [node.target for node in result.graph.nodes if node.op == "call_module"]
    assert called == ["norm1", "f", "norm2", "g"]
    assert torch.equal(result(X), model(X))
    half = X.bfloat16()
    assert torch.equal(result.to(torch.bfloat16)(half), copy.deepcopy(model).to(torch.bfloat16)(half))


class Casts(nn.Module):
    """Glue in which a dtype is written down, or follows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.f, self.g, self.kind = nn.Linear(8, 8), nn.Linear(8, 8), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.f(x)
        y = self.g(x)
        if self.kind == "cast":
            y = y.float().sin().to(x.dtype)
        if self.kind == "mask":
            y = y + torch.full((5, 8), torch.finfo(x.dtype).min, dtype=x.dtype).triu(9)
        if self.kind == "softmax":
            y = torch.softmax(y, -1, dtype=torch.float32).to(y.dtype)
        if self.kind == "mode" and self.training:
            y = y * torch.rand(y.shape[0], 1, 1, dtype=y.dtype)
        if self.kind == "follows":
            y = y.sin().type_as(x) + torch.zeros_like(x) + x.new_ones(8)
        return x + y


@pytest.mark.parametrize("kind", ["cast", "mask", "softmax", "mode"])
def test_a_dtype_in_the_glue_does_not_move_unsaid(kind: str) -> None:
    model = Casts(kind).eval()
    result = resfx.rewrite(model, resfx.Review(), (X,))
    before = {name: value.dtype for name, value in result.state_dict().items()}
    for dtype in (torch.bfloat16, torch.float64):
        with pytest.raises(resfx.CaptureError, match=r"torch\.float32 written down"):
            result.to(dtype)
    assert {name: value.dtype for name, value in result.state_dict().items()} == before
    assert torch.equal(result.to("cpu")(X), result.float()(X))
    half = resfx.rewrite(copy.deepcopy(model).bfloat16(), resfx.Review(), (X.bfloat16(),))
    half.load_state_dict(result.state_dict())
    assert half(X.bfloat16()).dtype == torch.bfloat16


def test_a_dtype_that_follows_moves() -> None:
    model = Casts("follows")
    result = resfx.rewrite(model, resfx.Standard(), (X,)).bfloat16()
    assert torch.equal(result(X.bfloat16()), copy.deepcopy(model).bfloat16()(X.bfloat16()))


def test_a_part_in_another_dtype() -> None:
    """Torch's own error, or none, as with the original."""
    model = Net()
    result = resfx.rewrite(model, resfx.Standard(), (X,))
    result.get_submodule("f").to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        result(X)
    assert result(X.bfloat16()).dtype == torch.bfloat16
    wide = WideNormNet()
    result = resfx.rewrite(wide, resfx.Standard(), (X,))
    for module in (wide, result):
        for child in module.children():
            child.to(torch.bfloat16)
    half = X.bfloat16()
    assert torch.equal(result(half), wide(half))
