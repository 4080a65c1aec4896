"""Attached models that call or contain each other, are called with other tensors, or attached where gradients are off."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import live_toys
import pytest
import torch
from live_helpers import Pair, assert_close, perturb, worst

import resfx

FORM = resfx.DeltaAttention()


class Caller(live_toys.Model):
    """Adds what another model says, which may ask this one back."""

    def __init__(self) -> None:
        super().__init__()
        self.others: list[Caller] = []

    def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:  # type: ignore[override]
        result: torch.Tensor = super().forward(x)
        for other in self.others if depth else ():
            result = result + other(x, depth - 1)
        return result


def callers() -> list[Caller]:
    torch._dynamo.reset()
    found = []
    for seed in (3, 9):
        torch.manual_seed(0)
        model = Caller().eval()
        resfx.attach(model, FORM, (live_toys.inputs(),), backend="eager")
        perturb(model, seed)
        found.append(model)
    return found


def test_two_models_that_call_each_other() -> None:
    """The first one, called by the second one, runs rewritten too."""
    x, (first, second) = live_toys.inputs(), callers()
    alone = [first(x), second(x)]
    assert worst([alone[0]], [alone[1]]) > 1e-3
    first.others, second.others = [second], [first]
    assert_close([first(x, 1)], [alone[0] + alone[1]])
    assert_close([first(x, 2)], [2 * alone[0] + alone[1]])
    assert_close([second(x, 3)], [2 * alone[0] + 2 * alone[1]])


def test_a_model_that_holds_an_attached_one() -> None:
    model, x = live_toys.model(), live_toys.inputs()
    resfx.attach(model.stack, FORM, (x,), backend="eager")
    with pytest.raises(resfx.LiveError, match=r"module `stack` is attached already; resfx\.detach"):
        resfx.attach(model, FORM, (x,), backend="eager")
    resfx.detach(model.stack)
    resfx.attach(model, FORM, (x,), backend="eager")


def test_a_block_of_an_attached_model_that_is_attached_by_itself() -> None:
    """It would cut the model's stream."""
    torch._dynamo.reset()
    model, x = live_toys.model(), live_toys.inputs()
    resfx.attach(model, FORM, (x,), backend="eager")
    perturb(model)
    before = model(x)
    block = model.stack.layers[0]
    resfx.attach(block, FORM, (x,), backend="eager")
    with pytest.raises(resfx.LiveError, match=r"module `stack\.layers\.0` was attached by itself, which resfx\.detach"):
        model(x)
    resfx.detach(block)
    torch._dynamo.reset()
    assert_close([model(x)], [before])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_attached_where_gradients_are_off_it_learns(mode: Callable[[], AbstractContextManager[None]]) -> None:
    torch._dynamo.reset()
    model, x = live_toys.model(), live_toys.inputs()
    with mode():
        resfx.attach(model, FORM, (x,), backend="eager")
        model(x)
    perturb(model)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("learns", [True, False])
def test_a_functional_call_with_plain_tensors_for_its_parameters(learns: bool) -> None:
    """As a step of meta-learning makes them: results of operations, no Parameters."""
    x = live_toys.inputs()
    pair = Pair(live_toys.model, FORM, (x,))
    given = {name: (p * 1.5 if learns else p.detach() * 1.5) for name, p in pair.live.named_parameters()}
    live, static = (torch.func.functional_call(model, given, (x,)) for model in (pair.live, pair.static))
    assert_close([live], [static])
    assert worst([live], [pair.static(x)]) > 1e-3
    assert live.requires_grad == learns
    if learns:
        own = torch.autograd.grad(live.square().sum(), list(pair.live.parameters()), retain_graph=True)
        assert_close(list(own), list(torch.autograd.grad(static.square().sum(), list(pair.live.parameters()))))
