"""torch.compile of rewritten models: one graph, forward and backward, every batch size from one dynamic compilation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models_steps import FORMS, distance, loss_of, outputs, pairs, run
from models_zoo import ZOO
from new_parameters import perturb
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import resfx


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


# In float32 two things stand between the plain model and its own compiled one, too: rounding flips what ReLU and max pooling
# choose (gradients move by 1e-3), and Inductor bounds the size of BatchNorm's reductions on the CPU (batch 2 to 4).
IN_DOUBLE = {"torchvision_resnet18", "torchvision_efficientnet_b0"}


def rewritten(name: str, form: str) -> resfx.Rewritten:
    model = ZOO[name].build()[0].to(dtype_of(name))
    result = resfx.rewrite(model, FORMS[form](), *inputs(name, 2))
    perturb(result)
    return result


def dtype_of(name: str) -> torch.dtype:
    return torch.float64 if name in IN_DOUBLE else torch.float32


def inputs(name: str, batch: int) -> tuple[Any, Any]:
    dtype = dtype_of(name)
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, ZOO[name].inputs(batch))


def forward_and_backward(model: nn.Module, args: Any, kwargs: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The outputs and the gradients of all parameters."""
    model.zero_grad()
    found = run(model, args, kwargs)
    loss_of(found).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {path: value.detach() for path, value in found.items()}, gradients


def check_against(eager: nn.Module, compiled: nn.Module, args: Any, kwargs: Any) -> None:
    outputs, gradients = forward_and_backward(compiled, args, kwargs)
    want, want_gradients = forward_and_backward(eager, args, kwargs)
    assert distance(outputs, want) < 1e-5
    got = {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}
    assert got.keys() == want_gradients.keys()
    # A bias in front of a norm has a gradient of zero up to rounding: measure on the scale of all of them.
    scale = max(float(value.norm()) for value in want_gradients.values())
    off = {name: float((got[name] - value).norm()) / scale for name, value in want_gradients.items()}
    assert {name: gap for name, gap in off.items() if not gap < 1e-5} == {}


@pytest.mark.parametrize(("name", "form"), list(pairs()))
def test_compile(name: str, form: str) -> None:
    """As a user calls it: the first batch size is compiled as it is, the second opens it, then none is compiled."""
    result = rewritten(name, form)
    compiled = torch.compile(result, fullgraph=True)
    for batch in (2, 3):
        check_against(result, compiled, *inputs(name, batch))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in range(2, 9):
            check_against(result, compiled, *inputs(name, batch))


def test_a_recompilation_is_seen() -> None:
    """The check above can fail."""
    result = rewritten("nanogpt", "review")
    compiled = torch.compile(result, fullgraph=True, backend="eager", dynamic=False)
    outputs(compiled, *ZOO["nanogpt"].inputs(2))
    with torch.compiler.set_stance("fail_on_recompile"), pytest.raises(RuntimeError, match="fail_on_recompile"):
        outputs(compiled, *ZOO["nanogpt"].inputs(3))
