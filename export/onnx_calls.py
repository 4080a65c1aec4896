"""Python functions that an ONNX file shows by name: each call of one is one node, and what it computes a function in the file.

Who knows such functions registers them. They must be what a graph in the model calls: a `torch.fx.Graph` of a module that has `recompile`.
Such a call is traced as one operator of torch's, which runs the function itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

NAMESPACE = "resfx_onnx"  # of the operators that stand for the functions while a model is traced


@dataclass(frozen=True)
class Named:
    """A function's name in ONNX and its `body`, see `resfx.export.onnx_local`."""

    name: str
    body: Callable[..., Any]


_known: dict[Callable[..., Any], Named] = {}
_operators: dict[Callable[..., Any], torch._ops.OpOverload] = {}


def register_calls(table: Mapping[Callable[..., Any], tuple[str, Callable[..., Any]]]) -> None:
    """Show calls of functions by name: function -> (name in ONNX, body).

    A function takes tensors, lists of tensors, numbers and dtypes, as its annotations say, and returns new tensors: one, or a list.
    `body(op, ...)` takes the same arguments with ONNX values for tensors, makes nodes by `op.Add(a, b)` and returns the results.
    """
    for function, (name, body) in table.items():
        _known[function] = Named(name, body)


@contextmanager
def calls_kept(model: nn.Module) -> Iterator[dict[torch._ops.OpOverload, Callable[..., Any]]]:
    """Let the graphs in `model` call operators in place of registered functions; gives the functions by their operators."""
    found: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
    changed: dict[nn.Module, list[tuple[fx.Node, Callable[..., Any]]]] = {}
    for module in model.modules():
        calls = _calls(getattr(module, "graph", None))
        if calls:
            changed[module] = calls
        for node, function in calls:
            node.target = _operator(function)
            found[node.target] = function
    try:
        _recompile(changed)
        yield found
    finally:
        for calls in changed.values():
            for node, function in calls:
                node.target = function
        _recompile(changed)


def named(function: Callable[..., Any]) -> Named:
    """What was registered for the function."""
    return _known[function]


def _calls(graph: object) -> list[tuple[fx.Node, Callable[..., Any]]]:
    if not isinstance(graph, fx.Graph):
        return []
    return [(n, n.target) for n in graph.nodes if n.op == "call_function" and n.target in _known]


def _recompile(modules: Mapping[nn.Module, object]) -> None:
    for module in modules:
        module.recompile()  # type: ignore[operator]


def _operator(function: Callable[..., Any]) -> torch._ops.OpOverload:
    """An operator of torch's that runs the function, made once."""
    if function not in _operators:
        taken = {str(operator._schema.name) for operator in _operators.values()}
        name = base = f"{NAMESPACE}::{re.sub(r'[^0-9A-Za-z_]', '_', function.__name__)}"
        while name in taken:
            name = f"{base}_{len(taken)}"
        operator = torch.library.custom_op(name, function, mutates_args=())
        operator.register_fake(function)
        _operators[function] = getattr(getattr(torch.ops, NAMESPACE), name.partition("::")[2]).default
    return _operators[function]
