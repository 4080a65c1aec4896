"""Glue that depends on train or eval follows `.training` on the result."""

from __future__ import annotations

import copy
import random
import re

import numpy
import pytest
import torch
import torch.nn.functional as F
from capture_helpers import assert_same, fold_model
from torch import nn

import resfx
from resfx.capture import CaptureError
from resfx.modes import ModeSwitch


class Block(nn.Module):
    def __init__(self, kind: str, d: int = 8) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.f = nn.LayerNorm(d), nn.Linear(d, d)
        self.drop = nn.Dropout(0.2) if kind == "passed_in_eval" else nn.Identity()
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("var", torch.ones(d))
        self.register_buffer("count", torch.zeros(()))

    def branch(self, b: torch.Tensor) -> torch.Tensor:
        kind = self.kind
        if kind == "dropout":
            return F.dropout(b, 0.3, self.training)
        if kind == "dropout_in_place":
            return F.dropout(b, 0.3, self.training, inplace=True)
        if kind == "dropout2d":
            return F.dropout2d(b.transpose(1, 2)[..., None], 0.3, self.training)[..., 0].transpose(1, 2)
        if kind == "batch_norm":
            return F.batch_norm(b.transpose(1, 2), self.mean, self.var, training=self.training).transpose(1, 2)
        if kind in ("passed_through", "passed_in_eval"):
            if self.training:
                self.count.add_(1)
            b = F.batch_norm(b.transpose(1, 2), self.mean, self.var, training=self.training).transpose(1, 2)
            return self.drop(b).relu()
        if kind == "attention":
            p = 0.2 if self.training else 0.0
            return F.scaled_dot_product_attention(b[:, None], b[:, None], b[:, None], dropout_p=p)[:, 0]
        if kind == "depth" and self.training:
            keep = b.new_empty(b.shape[0], 1, 1).bernoulli_(0.8)
            keep.div_(0.8)
            return b * keep
        if kind == "noise":
            return b + 0.1 * torch.randn_like(b) if self.training else b * 0.5
        return b

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch(self.f(self.norm(x)))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


KINDS = [
    "dropout",
    "dropout_in_place",
    "dropout2d",
    "batch_norm",
    "passed_through",
    "passed_in_eval",
    "attention",
    "depth",
    "noise",
]


@pytest.mark.parametrize("kind", KINDS)
def test_both_modes_live(kind: str) -> None:
    torch.manual_seed(0)
    model = Net(kind)
    x = torch.randn(3, 5, 8)
    graphed, folded = fold_model(model, (x,))
    assert folded.captured.mode == "train"
    switches = [module for module in graphed.modules() if isinstance(module, ModeSwitch)]
    assert len(switches) == (4 if kind.startswith("passed") else 2)  # the count is one of its own
    assert_same(model, graphed, (x,))
    assert_same(model, copy.deepcopy(graphed).requires_grad_(), (torch.randn(4, 6, 8),))
    assert list(graphed.state_dict()) == list(model.state_dict())
    graphed.train()
    train = [graphed(x) for _ in range(2)]
    graphed.eval()
    evaluated = [graphed(x) for _ in range(2)]
    assert torch.equal(*evaluated)
    assert not torch.equal(train[0], evaluated[0])


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_block_in_a_mode_of_its_own(backend: str | None) -> None:
    """Frozen layers in a model that trains; dropout at inference in one that does not."""
    graphed, _ = fold_model(Net("dropout"), (x := torch.randn(3, 5, 8),))
    graphed = copy.deepcopy(graphed)
    called = graphed if backend is None else torch.compile(graphed, backend=backend)
    for mode in (True, False):
        graphed.train(mode)
        for block in graphed.blocks:
            block.train(not mode)
        assert torch.equal(called(x), called(x)) is mode


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block("plain")

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        y = self.block(x)
        return (y, x.sum()) if self.training else y


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block("plain")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand([]) < 0.5:
            return x
        return self.block(x)


class PythonLayerDrop(LayerDrop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and random.random() < 0.1:
            return x
        return self.block(x)


class NumpyNoise(LayerDrop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) * (numpy.random.rand() if self.training else 1.0)


class DrawnFirst(LayerDrop):
    """Draws in both modes; who reads the number is another matter."""

    def __init__(self, kind: str, p: float) -> None:
        super().__init__()
        self.kind, self.p = kind, p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = random.uniform(0, 1) if self.kind == "python" else numpy.random.uniform(0, 1)
        if self.kind == "scale":
            return self.block(x) * drawn
        if (self.training or self.kind == "always") and drawn < self.p:
            return x
        return self.block(x)


@pytest.mark.parametrize("kind", ["python", "numpy"])
def test_a_draw_that_nobody_reads_is_none(kind: str) -> None:
    x = torch.randn(3, 5, 8)
    for p, mode in ((0.0, "train"), (0.5, "eval")):
        model = DrawnFirst(kind, p)
        graphed, folded = fold_model(model, (x,))
        assert folded.captured.mode == mode
        assert_same(model, graphed, (x,), modes=(False,) if p else (True, False))
    assert "test_modes.py" in next(
        note for note in folded.captured.notes if "does not trace (the model draws from" in note
    )
    assert isinstance(random.uniform(0, 1), float)
    assert isinstance(numpy.random.uniform(0, 1), float)


@pytest.mark.parametrize("kind", ["always", "scale"])
def test_a_draw_that_is_read_is_refused_where_it_is_read(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"draws from `numpy\.random`[^\n]*\n  at .*test_modes\.py:\d+: .*drawn"):
        fold_model(DrawnFirst(kind, 0.1), (torch.randn(3, 5, 8),))


class NumpyMask(LayerDrop):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            numpy.put_along_axis(numpy.zeros((3, 5)), numpy.zeros((3, 1)), 1, -1)  # the error is raised inside of numpy
        return self.block(x)


def test_draws_that_are_not_torchs_are_given_back() -> None:
    random.seed(3)
    expected = random.random()
    random.seed(3)
    for model in (PythonLayerDrop(), DrawnFirst("python", 0.0)):
        resfx.find(model, (x := torch.randn(3, 5, 8),))
        resfx.rewrite(model, resfx.Standard(), (x,))
    assert random.random() == expected


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Auxiliary, "another structure"),
        (LayerDrop, r"does not trace .*test_modes\.py:\d+: if self\.training"),
        (PythonLayerDrop, "draws from Python's `random`"),
        (NumpyMask, r"does not trace .*IndexError.*test_modes\.py:\d+: numpy\.put_along_axis.*options"),
        (NumpyNoise, r"draws from `numpy\.random`"),
    ],
)
def test_eval_only_models_say_why(kind: type[nn.Module], reason: str) -> None:
    model = kind()
    x = torch.randn(3, 5, 8)
    graphed, folded = fold_model(model, (x,))
    assert folded.captured.mode == "eval"
    assert any(re.search(reason.removesuffix(".*options"), note) for note in folded.captured.notes)
    assert not graphed.training
    assert_same(model, graphed.eval(), (x,), modes=(False,))
    with pytest.raises(CaptureError, match=reason):
        graphed.train()
