"""Helpers for the capture tests: capture, fold, and compare with the original, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from resfx.capture import Captured, Folded, GraphedModule, capture, capture_folded
from resfx.patterns.dialect import call_entries

ADDS = ("add.Tensor", "add", "iadd", "slice_scatter.default")


def open_paths(flat: Captured) -> set[str]:
    """The plain choice: modules that hold an addition in their own glue."""
    return {
        call_entries(node)[-1][0]
        for node in flat.graph.nodes
        if node.op in ("call_function", "call_method")
        and (getattr(node.target, "__name__", "") in ADDS or node.target == "add")
        and call_entries(node)
    }


def fold_model(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, **options: Any
) -> tuple[GraphedModule, Folded]:
    """The folded model on the very submodules of `model`; the model's flags must not have moved."""
    flags = [module.training for module in model.modules()]
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    flat = capture(model, args, kwargs or {}, **options)
    folded = capture_folded(model, args, kwargs or {}, flat, open_paths(flat), lambda captured: None)
    assert [module.training for module in model.modules()] == flags
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return GraphedModule(folded.captured.graph_module), folded


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def run(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool = True
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None], dict[str, torch.Tensor]]:
    """Outputs, gradients and the state afterwards; parameters and buffers are put back."""
    before = copy.deepcopy(model.state_dict())
    model.zero_grad()
    torch.manual_seed(7)
    outputs = tensors(model(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    if backward:
        torch.stack([out.double().sin().sum() for out in outputs if out.requires_grad]).sum().backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    after = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(before)
    return [out.detach() for out in outputs], grads, after


def assert_same(
    model: nn.Module,
    graphed: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    modes: tuple[bool, ...] = (False, True),
    backward: bool = True,
    exact: bool = True,
) -> None:
    """Equal outputs, gradients and buffers, in eval and (with one seed) in train mode.

    `exact=False` allows for float32 rounding: while tracing, transformers hands attention an explicit causal mask, in
    eager mode `is_causal`, and the two kernels round differently.
    """
    kwargs = kwargs or {}
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for mode in modes:
            model.train(mode)
            graphed.train(mode)
            expected = run(model, args, kwargs, backward)
            got = run(graphed, args, kwargs, backward)
            _equal(expected, got, mode, exact)
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _equal(expected: Any, got: Any, mode: bool, exact: bool) -> None:
    assert len(expected[0]) == len(got[0]) > 0
    for left, right in zip(expected[0], got[0], strict=True):
        assert left.dtype == right.dtype
        _close(left, right, exact, f"output, train={mode}")
    assert list(expected[1]) == list(got[1])
    for name, left in expected[1].items():
        right = got[1][name]
        assert (left is None) == (right is None), f"gradient of {name}, train={mode}"
        if left is not None:
            _close(left, right, exact, f"gradient of {name}, train={mode}")
    for name, left in expected[2].items():
        assert torch.equal(left, got[2][name]), f"state {name} after the call, train={mode}"


def _close(left: torch.Tensor, right: torch.Tensor, exact: bool, what: str) -> None:
    if exact:
        assert torch.equal(left, right), what
        return
    # Float32 rounding of a whole tensor: single small entries of a gradient may be off by more.
    error = (left.double() - right.double()).norm() / left.double().norm().clamp_min(1e-12)
    assert error < 1e-5, f"{what}: {error}"
