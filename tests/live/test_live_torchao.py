"""Leaves quantised by torchao, before a rewrite and after it: the weights are what is exchanged, streams and new parameters stay."""

from __future__ import annotations

import copy

import pytest
import torch
from new_parameters import perturb
from torch import Tensor, nn
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_

import resfx

CONFIGS = {"weights": Int8WeightOnlyConfig, "activations": Int8DynamicActivationInt8WeightConfig}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture(params=CONFIGS)
def plain(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, object]:
    torch.manual_seed(0)
    return Blocks().eval(), torch.randn(2, 5, 32), CONFIGS[request.param]()


@torch.no_grad()
def test_quantised_before(plain: tuple[nn.Module, Tensor, object]) -> None:
    model, x, config = plain
    quantize_(model, config)
    want = model(x)
    rewritten = resfx.rewrite(model, resfx.DeltaAttention(), (x,), warm_start=True)
    assert len(rewritten.residual_map.sites) == 4
    assert torch.allclose(rewritten(x), want, atol=1e-6)
    resfx.attach(model, resfx.DeltaAttention(), (x,), warm_start=True, backend="eager")
    assert torch.allclose(model(x), want, atol=1e-6)


@torch.no_grad()
def test_quantised_after(plain: tuple[nn.Module, Tensor, object]) -> None:
    """The rewritten and the attached model take the quantised leaves in, and agree."""
    model, x, config = plain
    rewritten = resfx.rewrite(model, resfx.DeltaAttention(), (x,))
    perturb(rewritten)
    attached = copy.deepcopy(model)
    resfx.attach(attached, resfx.DeltaAttention(), (x,), backend="eager")
    attached.load_state_dict(rewritten.state_dict())
    before = attached(x)
    for each in (rewritten, attached):
        quantize_(each, config)
    assert torch.allclose(attached(x), rewritten(x), atol=1e-5)
    assert 1e-4 < float((attached(x) - before).norm() / before.norm()) < 0.1
