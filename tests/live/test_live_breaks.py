"""Graph breaks in places where no graph holds enough of a stream to tell that it is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import live_toys
import pytest
import torch
from live_helpers import assert_close, perturb
from torch import nn

import resfx


def breaking(module: nn.Module, *args: Any) -> None:
    torch._dynamo.graph_break()


@torch.compiler.disable
def unseen(module: nn.Module, *args: Any) -> None:
    """What a sharding library's hooks are to Dynamo."""


def attached() -> live_toys.Model:
    torch._dynamo.reset()
    model = live_toys.model()
    resfx.attach(model, resfx.DeltaAttention(), (live_toys.inputs(),), backend="eager")
    perturb(model)
    return model


def leaves(model: nn.Module, within: str) -> list[nn.Module]:
    return [m for path, m in model.named_modules() if path.startswith(within) and not list(m.children())]


@pytest.mark.parametrize("hook", [breaking, unseen])
def test_a_break_in_every_leaf(hook: Callable[..., None]) -> None:
    """Each graph is a leaf, or a sum of two inputs: nothing in it says where it belongs."""
    model = attached()
    for leaf in leaves(model, "stack.layers."):
        leaf.register_forward_pre_hook(hook)
    for _ in range(2):
        with pytest.raises(resfx.LiveError, match=r"ran plainly.*break"):
            model(live_toys.inputs())


def test_a_leaf_that_decides_on_its_numbers() -> None:
    class Gated(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 1e9 else super().forward(x) * 2

    torch._dynamo.reset()
    model = live_toys.model()
    for block in model.stack.layers:
        block.a.__class__ = block.b.__class__ = Gated  # type: ignore[union-attr]
    resfx.attach(model, resfx.DeltaAttention(), (live_toys.inputs(),), backend="eager")
    with pytest.raises(resfx.LiveError, match=r"test_live_breaks\.py"):
        model(live_toys.inputs())


def test_breaks_on_the_way_to_the_stream_are_harmless() -> None:
    model = attached()
    before = model(live_toys.inputs())
    for leaf in (model.embed, model.stack, model.head, model.stack.norm):
        leaf.register_forward_pre_hook(breaking)
    assert_close([model(live_toys.inputs())], [before])
    for leaf in (model.embed, model.stack, model.head, model.stack.norm):
        leaf.register_forward_hook(unseen)
    assert_close([model(live_toys.inputs(3, 4))[:2, :2]], [attached()(live_toys.inputs(3, 4))[:2, :2]])
