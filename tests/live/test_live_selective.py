"""Checkpointing with a policy of the user's own (what is kept, what is computed again) in an attached model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import live_toys
import pytest
import torch
from live_helpers import Pair, assert_close
from live_transformers import DECODERS, tokens
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import resfx

FORM = resfx.DeltaAttention()
LINEAR = torch.ops.aten.addmm.default
KEEP, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE


def keep_linear(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return KEEP if op is LINEAR else AGAIN


def keep_nothing(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return AGAIN


def every_second() -> Any:
    """A policy that counts: of each region's two linear layers it keeps the first."""
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.extend([op] if op is LINEAR else [])
        return KEEP if op is LINEAR and len(seen) % 2 else AGAIN

    return create_selective_checkpoint_contexts(policy)


def contexts(policy: Callable[..., Any]) -> Callable[[], Any]:
    return functools.partial(create_selective_checkpoint_contexts, policy)


class Selective(live_toys.Stack):
    """Recomputes in each of its layers what the policy says; `outer`: and, around them, the whole."""

    def __init__(self, context_fn: Callable[[], Any], outer: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.context_fn, self.outer = context_fn, outer

    def forward(self, x: torch.Tensor, states: bool = False) -> Any:
        if self.outer is None:
            return self.run(x)
        return checkpoint(self.run, x, use_reentrant=False, **self.outer)

    def run(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.context_fn)
        return self.norm(x)


class Compiler:
    """A backend that counts the linear layers of its forward graphs and, computed again, of its backward graphs."""

    def __init__(self) -> None:
        self.forward, self.again = 0, 0
        self._compile = aot_autograd(fw_compiler=self._forward, bw_compiler=self._backward, inference_compiler=_run)

    def __call__(self, graph: fx.GraphModule, example: list[Any]) -> Any:
        return self._compile(graph, example)

    def _forward(self, graph: fx.GraphModule, example: list[Any]) -> Any:
        self.forward += _linear(graph)
        return _run(graph, example)

    def _backward(self, graph: fx.GraphModule, example: list[Any]) -> Any:
        self.again += _linear(graph)
        return _run(graph, example)


def _run(graph: fx.GraphModule, example: list[Any]) -> Any:
    from functorch.compile import make_boxed_func

    return make_boxed_func(graph.forward)


def _linear(graph: fx.GraphModule) -> int:
    return sum(node.target is LINEAR for node in graph.graph.nodes)


def selective(context_fn: Callable[[], Any], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return Selective(context_fn, **options).eval()


@pytest.mark.parametrize(
    ("context_fn", "again"),
    [(contexts(keep_linear), (0, 0)), (every_second, (1, 2)), (contexts(keep_nothing), (2, 4))],
    ids=["linear", "every second", "nothing"],
)
@pytest.mark.parametrize(("form", "which"), [(FORM, 0), (resfx.MultiGate(streams=2), 1)], ids=["delta", "multi_gate"])
def test_the_policy_says_what_is_computed_again(
    context_fn: Callable[[], Any], again: tuple[int, int], form: resfx.Form, which: int
) -> None:
    """Four linear layers in two regions. Delta reads the first region's two in the second one: a region's outputs are kept."""
    compiler = Compiler()
    pair = Pair(lambda: selective(context_fn), form, (live_toys.inputs(),), backend=compiler)
    pair.assert_same(live_toys.inputs())
    assert (compiler.forward, compiler.again) == (4, again[which])
    pair.assert_same(live_toys.inputs(3, 7))
    with torch.no_grad():
        pair.assert_same(live_toys.inputs(), gradients=False)


@pytest.mark.parametrize("outer", [{}, {"context_fn": contexts(keep_linear)}], ids=["plain", "with a policy"])
def test_regions_in_a_region(outer: dict[str, Any]) -> None:
    compiler = Compiler()
    make = functools.partial(selective, contexts(keep_nothing), outer=outer)
    pair = Pair(make, FORM, (live_toys.inputs(),), backend=compiler)
    pair.assert_same(live_toys.inputs())
    assert (compiler.forward, compiler.again) == (4, 2)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_through_dropout_are_those_of_what_ran(backend: str) -> None:
    """With a mask drawn anew they would not be."""

    def make(layer: Callable[[], nn.Module]) -> nn.Module:
        model = layer().train()
        for block in model.layers:  # type: ignore[union-attr]
            block.a = nn.Sequential(block.a, nn.Dropout(0.5))
        return model

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return live_toys.Stack()

    found = []
    for layer in (lambda: selective(contexts(keep_linear)), plain):
        pair = Pair(functools.partial(make, layer), FORM, (live_toys.inputs(),), backend=backend)
        torch.manual_seed(5)
        pair.live(live_toys.inputs()).square().sum().backward()
        found.append([p.grad for p in pair.live.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 8
    assert_close(found[0], found[1])


def test_a_library_is_given_the_policy_after_attach() -> None:
    ids = tokens()
    compiler = Compiler()
    pair = Pair(DECODERS["llama"], FORM, (), {"input_ids": ids}, std=0.3, backend=compiler)
    pair.live.train().gradient_checkpointing_enable(  # type: ignore[operator]
        {"use_reentrant": False, "context_fn": contexts(keep_nothing)}
    )
    logits = [model(input_ids=ids).logits for model in (pair.live, pair.static)]
    assert_close([logits[0]], [logits[1]])
    for result in logits:
        (result * torch.arange(result.shape[-1])).mean().backward()
    theirs = dict(pair.static.named_parameters())
    for name, parameter in pair.live.named_parameters():
        assert_close([parameter.grad], [theirs[name].grad])  # type: ignore[list-item]
