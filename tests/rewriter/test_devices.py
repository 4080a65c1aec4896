"""A result moves to another device with all that its graph makes there. The meta device stands for any other one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import resfx

TOKENS = torch.randint(0, 11, (2, 5))


class Net(nn.Module):
    """Makes tensors in its own forward: positions, a mask, a cast to the device, a switch between train and eval."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(16, 8)
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device)).to(x.device)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        x = x + F.dropout(self.a(x), 0.5, self.training)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=False):
            x = x + torch.where(mask, self.b(x) @ x.mT, 0.0) @ x
        if self.training:
            x = x + torch.zeros(8, device=x.device)
        return x + self.c(x)


@pytest.mark.parametrize("form", [resfx.DeltaAttention(), resfx.Review()])
def test_a_result_moves_with_its_graph(form: resfx.Form) -> None:
    model = Net().eval()
    result = resfx.rewrite(model, form, (TOKENS,))
    moved = copy.deepcopy(result).to("meta")
    assert {p.device.type for p in moved.parameters()} == {"meta"}
    for mode in (False, True):
        assert moved.train(mode)(TOKENS.to("meta")).device.type == "meta"
    assert "device(type='cpu')" not in moved.code
    assert result(TOKENS).device.type == "cpu"


def test_there_and_back() -> None:
    model = Net().eval()
    result = resfx.rewrite(model, resfx.DeltaAttention(), (TOKENS,))
    want = result(TOKENS)
    state = copy.deepcopy(result.state_dict())
    result.to("meta").to_empty(device="cpu").load_state_dict(state)
    assert torch.equal(result(TOKENS), want)


def test_a_part_that_is_moved_is_the_users_own_affair() -> None:
    """As with any module: the parts no longer fit."""
    result = resfx.rewrite(Net().eval(), resfx.DeltaAttention(), (TOKENS,))
    result.c.to("meta")
    with pytest.raises(RuntimeError, match="meta"):
        result(TOKENS)


def test_another_stream_after_the_move() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
            self.between = nn.Linear(8, 6)
            self.e, self.f = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.a(x)
            x = x + self.b(x) + torch.arange(8, device=x.device)
            x = self.between(x)
            x = x + self.e(x)
            return x + self.f(x)

    x = torch.randn(3, 8)
    first = resfx.rewrite(Two().eval(), resfx.DeltaAttention(), (x,), streams=[0]).to("meta")
    both = resfx.rewrite(first, resfx.Review(), (x.to("meta"),), streams=[1])
    assert both(x.to("meta")).device.type == "meta"
    assert {p.device.type for p in both.parameters()} == {"meta"}


def test_a_move_to_a_device_keeps_the_dtype_open() -> None:
    """`.to(device)` names no dtype: the result follows `.to(dtype)`."""
    model = Net().eval()
    half = copy.deepcopy(model).to(torch.bfloat16)(TOKENS)
    result = resfx.rewrite(model, resfx.Standard(), (TOKENS,)).to(torch.bfloat16)
    assert torch.equal(result(TOKENS), half)
