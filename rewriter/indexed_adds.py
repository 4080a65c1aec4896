"""`x.index_add(0, rows, f(x))` as `x + zeros.index_add(0, rows, f(x))`: a sum, which the search and the passes read as any other.

Only where what is added was computed from the tensor that it is added to. What experts or edges add to zeros stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from resfx.patterns.dialect import data_inputs, is_floating, op_name
from resfx.patterns.slices import strip
from resfx.twins import fake_result

aten = torch.ops.aten


def spell_out_indexed_adds(graph: fx.Graph) -> None:
    """Replace them in place; a node that was an indexed add is the sum afterwards."""
    adds = [node for node in graph.nodes if _is_indexed_add(node)]
    for node in _reading_their_base(graph, adds):
        _spell_out(graph, node)


def _is_indexed_add(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if not is_floating(node):
        return False
    name = op_name(node)
    if name in ("scatter_reduce", "scatter"):
        reduce = node.kwargs.get("reduce", node.args[4] if len(node.args) > 4 else None)
        return reduce in ("sum", "add") and node.kwargs.get("include_self", True) is True and len(node.args) < 6
    if name == "index_put":
        return node.kwargs.get("accumulate", node.args[3] if len(node.args) > 3 else False) is True
    return name in ("index_add", "scatter_add")


def _reading_their_base(graph: fx.Graph, adds: Sequence[fx.Node]) -> list[fx.Node]:
    """Those whose other arguments depend on the tensor that they add to; one pass, sets of tensors as bits."""
    bits: dict[fx.Node, int] = {}
    for node in adds:
        bits.setdefault(strip(_base(node)), 1 << len(bits))
    found: list[fx.Node] = []
    reach: dict[fx.Node, int] = {}
    pending = set(adds)
    for node in graph.nodes if adds else ():
        inputs = list(data_inputs(node))
        if node in pending and any(reach.get(i, 0) & bits[strip(_base(node))] for i in inputs if i is not _base(node)):
            found.append(node)
        depends = bits.get(node, 0)
        for i in inputs:
            depends |= reach.get(i, 0)
        if depends:
            reach[node] = depends
    return found


def _base(node: fx.Node) -> fx.Node:
    base = node.args[0]
    assert isinstance(base, fx.Node)
    return base


def _spell_out(graph: fx.Graph, node: fx.Node) -> None:
    base, overload = _base(node), isinstance(node.target, torch._ops.OpOverload)
    with graph.inserting_before(node):
        zeros = graph.call_function(aten.zeros_like.default if overload else torch.zeros_like, (base,))
        _fill_meta(zeros, node)
        update = graph.create_node(node.op, node.target, (zeros, *node.args[1:]), dict(node.kwargs))
        _fill_meta(update, node)
    add: Any = aten.add.Tensor if overload else torch.add
    node.op, node.target, node.args, node.kwargs = "call_function", add, (base, update), {}


def _fill_meta(new: fx.Node, like: fx.Node) -> None:
    new.meta = {key: value for key, value in like.meta.items() if key not in ("val", "example_value", "tensor_meta")}
    value = fake_result(new)
    if value is not None:
        new.meta["val"] = value
