"""In-place operations and their functional twins, in every spelling of a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# In-place ops whose functional twin has another name.
_RENAMED = {
    "bernoulli_.float": "bernoulli.p",
    "normal_.default": "normal_functional.default",
}


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that `node` writes to, by its schema."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return [node.args[0]] if python_twin(node) is not None and isinstance(node.args[0], fx.Node) else []
    found = []
    for position, argument in enumerate(target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if isinstance(value, fx.Node):
            found.append(value)
    return found


_OPERATORS = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}

_DUNDERS = {"__iadd__": "__add__", "__isub__": "__sub__", "__imul__": "__mul__", "__itruediv__": "__truediv__"}


def python_twin(node: fx.Node) -> tuple[str, Any, dict[str, Any]] | None:
    """(op, target, kwargs) of the functional spelling of `h += f`, `h.add_(f)`, `relu(h, inplace=True)`; else None."""
    if node.op == "call_function" and node.target in _OPERATORS:
        return "call_function", _OPERATORS[node.target], dict(node.kwargs)
    if node.op == "call_function" and node.kwargs.get("inplace") is True:
        return "call_function", node.target, {**node.kwargs, "inplace": False}
    name = str(node.target)
    if node.op == "call_method" and name in _DUNDERS:
        return "call_method", _DUNDERS[name], dict(node.kwargs)
    if node.op == "call_method" and name.endswith("_") and not name.endswith("__") and hasattr(torch.Tensor, name[:-1]):
        return "call_method", name[:-1], dict(node.kwargs)
    return None


def functional_twin(target: Any) -> Callable[..., Any] | None:
    """`aten.add.Tensor` for `aten.add_.Tensor`; None where no op of the same arguments exists."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    namespace, name = target._schema.name.split("::")
    if not name.endswith("_"):
        return None
    wanted = _RENAMED.get(f"{name}.{target._overloadname}", f"{name[:-1]}.{target._overloadname}")
    packet = getattr(getattr(torch.ops, namespace), wanted.split(".")[0], None)
    twin = getattr(packet, wanted.split(".")[1], None) if packet is not None else None
    if not isinstance(twin, torch._ops.OpOverload):
        return None
    ours = [str(argument.type) for argument in target._schema.arguments]
    theirs = [str(argument.type) for argument in twin._schema.arguments]
    return twin if ours == theirs else None


def own_defaults(node: fx.Node, twin: Any) -> dict[str, Any]:
    """Arguments that `node` leaves to its default and that `twin` demands: `bernoulli_()` draws with p = 0.5."""
    given: Any = node.target
    pairs = list(zip(given._schema.arguments, twin._schema.arguments, strict=True))[len(node.args) :]
    return {
        theirs.name: ours.default_value
        for ours, theirs in pairs
        if not theirs.has_default_value() and ours.has_default_value()
    }


def fake_result(node: fx.Node, mode: FakeTensorMode | None = None) -> Any:
    """The node's value on the fake values of its arguments; None where one has none. `mode`: for tensors made of numbers alone."""
    values = [argument.meta.get("val") for argument in node.all_input_nodes]
    if any(value is None for value in values):
        return None
    made = mode if node.target is getattr(torch, getattr(node.target, "__name__", ""), None) else None
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), made)
    args = fx.map_arg(node.args, lambda n: n.meta["val"])
    kwargs = fx.map_arg(node.kwargs, lambda n: n.meta["val"])
    target: Any = node.target
    if node.op == "call_method":
        target = getattr(torch.Tensor, str(node.target))
    if mode is None:
        return target(*args, **kwargs) if getattr(target, "__module__", "") in ("_operator", "builtins") else None
    with mode, torch.enable_grad():
        return target(*args, **kwargs)
