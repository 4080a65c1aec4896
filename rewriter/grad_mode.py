"""Operations that the model runs with gradients off, in whatever way: they get none in the captured graph either.

torch.export loses a no_grad inside an autocast region, and every inference_mode. So the mode is noted at each node.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx

from resfx.patterns.dialect import call_entries
from resfx.regions import NO_GRAD

aten = torch.ops.aten

# Marks nodes that were traced with gradients off.
_GRAD_OFF = "resfx_grad_off"


def runs_without_gradients(node: fx.Node) -> bool:
    """Was it traced with gradients off, in a region or in another way?"""
    return bool(node.meta.get(_GRAD_OFF) or node.meta.get(NO_GRAD))


def with_gradients(meta: dict[str, Any]) -> dict[str, Any]:
    """The meta of a node that runs outside of what was traced with gradients off."""
    return {key: value for key, value in meta.items() if key not in (_GRAD_OFF, NO_GRAD)}


def overwritten(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`old` with the numbers of `new`, as after `with torch.no_grad(): old.copy_(new)`: autograd sees `old` alone."""
    result = old.clone()
    result.detach().copy_(new.detach())
    return result


@contextlib.contextmanager
def noted_grad_mode() -> Iterator[None]:
    """While this is active every traced node knows whether gradients were off."""
    create = fx.proxy.TracerBase.create_node

    def noting(tracer: fx.proxy.TracerBase, *args: Any, **kwargs: Any) -> fx.Node:
        node = create(tracer, *args, **kwargs)
        if not torch.is_grad_enabled():
            node.meta[_GRAD_OFF] = True
        return node

    with mock.patch.object(fx.proxy.TracerBase, "create_node", noting):
        yield


def cut_gradients(graph: fx.Graph) -> bool:
    """Detach the inputs of what ran with gradients off, where an inlined no_grad region has not done it. Was there any?

    Higher-order ops stay: torch itself traces them with gradients off.
    """
    detached: dict[tuple[Any, ...], fx.Node] = {}
    found = False
    for node in graph.nodes:
        if not runs_without_gradients(node) or not isinstance(node.target, torch._ops.OpOverload):
            continue
        for operand in node.all_input_nodes if node.target is not aten.detach.default else ():
            if not may_have_gradients(operand):
                continue
            # One for each module call: a leaf's values must not be read outside of it.
            key = (operand, *call_entries(node))
            if key not in detached:
                detached[key] = detached_for(graph, operand, node)
            node.replace_input_with(operand, detached[key])
            found = True
        node.meta[NO_GRAD] = True
    return found


def may_have_gradients(operand: fx.Node) -> bool:
    value = operand.meta.get("val")
    if operand.meta.get(NO_GRAD) or not isinstance(value, torch.Tensor):
        return False
    return value.dtype.is_floating_point or value.dtype.is_complex


def detached_for(graph: fx.Graph, operand: fx.Node, reader: fx.Node) -> fx.Node:
    with graph.inserting_before(reader):
        new = graph.call_function(aten.detach.default, (operand,))
    new.meta = {k: v for k, v in operand.meta.items() if k in ("val", "tensor_meta")}
    new.meta.update({k: v for k, v in reader.meta.items() if k not in ("val", "tensor_meta")})
    new.meta[NO_GRAD] = True
    return new
