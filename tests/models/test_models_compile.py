"""torch.compile of rewritten models: one graph, forward and backward, every batch size from one dynamic compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models_steps import FORMS, distance, loss_of, outputs, pairs, perturb, run
from models_zoo import ZOO
from torch import Tensor, nn

import resfx


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def rewritten(name: str, form: str) -> resfx.Rewritten:
    model, args, kwargs = ZOO[name].build()
    result = resfx.rewrite(model, FORMS[form](), args, kwargs)
    perturb(result)
    return result


def gradients(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Tensor]:
    model.zero_grad()
    loss_of(run(model, args, kwargs)).backward()
    return {name.removeprefix("_orig_mod."): p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_against(eager: nn.Module, compiled: nn.Module, args: Any, kwargs: Any) -> None:
    assert distance(outputs(compiled, args, kwargs), outputs(eager, args, kwargs)) < 1e-5
    got, want = gradients(compiled, args, kwargs), gradients(eager, args, kwargs)
    assert got.keys() == want.keys()
    # A bias in front of a norm has a gradient of zero up to rounding: measure on the scale of all of them.
    scale = max(float(value.norm()) for value in want.values())
    assert [name for name in want if not float((got[name] - want[name]).norm()) < 1e-5 * scale] == []


@pytest.mark.parametrize(("name", "form"), pairs())
def test_compile(name: str, form: str) -> None:
    """As a user calls it: the first batch size is compiled as it is, the second opens it, then none is compiled."""
    result = rewritten(name, form)
    compiled = torch.compile(result, fullgraph=True)
    for batch in (2, 3):
        check_against(result, compiled, *ZOO[name].inputs(batch))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in range(2, 9):
            check_against(result, compiled, *ZOO[name].inputs(batch))


def test_a_recompilation_is_seen() -> None:
    """The check above can fail."""
    result = rewritten("nanogpt", "review")
    compiled = torch.compile(result, fullgraph=True, backend="eager", dynamic=False)
    outputs(compiled, *ZOO["nanogpt"].inputs(2))
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        outputs(compiled, *ZOO["nanogpt"].inputs(3))
