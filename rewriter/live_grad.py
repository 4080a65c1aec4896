"""Regions of a Dynamo graph that the model runs with gradients off: what they are given is detached, and they are a region no more.

So the model's own parameters learn nothing there, as before, and the new ones learn, as they do in a static rewrite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from resfx.grad_mode import detached_for, may_have_gradients
from resfx.regions import NO_GRAD
from resfx.twins import written_arguments


def inline_no_grad(graph: fx.Graph) -> None:
    """Inline every such region that begins and ends in the graph. One that writes to its inputs (a buffer) stays as it is."""
    if not torch.is_grad_enabled():
        return
    for region in _regions(graph):
        if not any(written_arguments(node) for node in region):
            _inline(graph, region)


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes from one that switches gradients off to the one that switches them on again, both included."""
    found: list[list[fx.Node]] = []
    region: list[fx.Node] = []
    for node in graph.nodes:
        if not region and not (_switches(node) and node.args[0] is False):
            continue
        region.append(node)
        if _switches(node) and node.args[0] is True:
            found.append(region)
            region = []
    return found


def _switches(node: fx.Node) -> bool:
    """Private: Dynamo writes no_grad and enable_grad as calls of this function."""
    return node.op == "call_function" and node.target is torch._C._set_grad_enabled


def _inline(graph: fx.Graph, region: Sequence[fx.Node]) -> None:
    detached: dict[fx.Node, fx.Node] = {}
    for node in region:
        if _switches(node):
            graph.erase_node(node)
            continue
        for operand in node.all_input_nodes:
            if not may_have_gradients(operand):
                continue
            if operand not in detached:
                detached[operand] = detached_for(graph, operand, node)
            node.replace_input_with(operand, detached[operand])
        node.meta[NO_GRAD] = True
