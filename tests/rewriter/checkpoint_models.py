"""Models and comparisons that the tests of checkpoints share."""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor, nn

import resfx

FORMS = {
    "standard": resfx.Standard(),
    "delta": resfx.DeltaAttention(null_source=True, gate="vector"),
    "delta_block": resfx.DeltaAttention(granularity="block", blocks=2, query_init_std=0.5),
    "attention_residual": resfx.AttentionResidual(eps=1e-5),
    "multi_gate": resfx.MultiGate(streams=2, gate="competitive", b_base=-4.5),
    "review": resfx.Review(),
    "highway": resfx.Highway(convex=True),
    "scaled_loop": resfx.ScaledLoop(lam=0.7, learnable=True),
}


class Block(nn.Module):
    def __init__(self, size: int, keep: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.inner = nn.Linear(size, size)
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        return self.keep * x + self.inner(self.norm(x)).tanh()


class Tied(nn.Module):
    """A language model with tied embeddings, a persistent and a non-persistent buffer and a counter."""

    def __init__(self, size: int = 8, depth: int = 3, out: int = 11, tie: bool = True, keep: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, size)
        self.blocks = nn.ModuleList(Block(size, keep) for _ in range(depth))
        self.head = nn.Linear(size, out, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("steps", torch.tensor([3]))
        self.register_buffer("offset", torch.arange(size) / size, persistent=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.tensor([[1, 4, 2, 7, 9], [0, 3, 10, 5, 5]])


def tied(seed: int = 0, **options: Any) -> Tied:
    torch.manual_seed(seed)
    return Tied(**options).eval()


def shake(model: nn.Module) -> None:
    """All parameters, the new ones too, somewhere else."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


@functools.cache
def review() -> resfx.Rewritten:
    return resfx.rewrite(tied(), resfx.Review(), (TOKENS,))


def rewritten(form: resfx.Form | None = None, model: nn.Module | None = None, **options: Any) -> resfx.Rewritten:
    """By default `tied()` in Review; other numbers at every call."""
    if form is None and model is None:
        result = copy.deepcopy(review())
    else:
        result = resfx.rewrite(model or tied(), form or resfx.Review(), (TOKENS,), **options)
    shake(result)
    return result


def assert_same(loaded: resfx.Rewritten, saved: resfx.Rewritten) -> None:
    assert torch.equal(loaded(TOKENS), saved(TOKENS))
    expected, state = saved.state_dict(), loaded.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name
    assert loaded.residual_map.forms == saved.residual_map.forms
