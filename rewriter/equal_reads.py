"""Equal reads are one value: in `x[:, rows] += f(x[:, rows])` the state is read twice, by two operations that give the same numbers.

So the search sees that the update is computed from what it is added to, and a form can give both what they read.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from resfx.grad_mode import runs_without_gradients
from resfx.live_selective import REGION as CHECKPOINT
from resfx.patterns.dialect import LAYOUT, SLICE, call_entries, op_name
from resfx.patterns.places import is_whole_slice
from resfx.regions import REGION
from resfx.twins import written_arguments
from resfx.views import source_of

_READS = frozenset("index index_select gather take_along_dim getitem".split())  # by tensors of indices: no views
_LITERAL = frozenset("lift_fresh lift_fresh_copy".split())
_LONGEST = 4096  # numbers of a literal that are compared


def merge_equal_reads(module: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Let who reads the later ones read the first, in place; returns the first of each that is gone.

    For a graph whose updates are functional. Reads of different modules, or regions, stay apart: they are folded apart.
    """
    reads = [node for node in module.graph.nodes if _is_read(node)]
    if len(reads) < 2:
        return {}
    written = {_base(argument) for node in module.graph.nodes for argument in _overwritten(node)}
    first: dict[Any, fx.Node] = {}
    merged: dict[fx.Node, fx.Node] = {}
    for node in reads:
        if any(_base(i) in written for i in node.all_input_nodes):
            continue
        kept = first.setdefault((_place(node), _key(node, module)), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            module.graph.erase_node(node)
            merged[node] = kept
    return merged


def _is_read(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or op_name(node) not in _READS or not node.args:
        return False
    return isinstance(node.args[0], fx.Node) and isinstance(node.args[0].meta.get("val"), torch.Tensor)


def _overwritten(node: fx.Node) -> list[fx.Node]:
    """The arguments whose numbers the node changes: `detach_`, which literals go through, changes none."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and torch.Tag.inplace_view in target.tags:
        return []
    if target is operator.setitem:
        return [source for source in node.args[:1] if isinstance(source, fx.Node)]
    return written_arguments(node)


def _base(node: fx.Node) -> fx.Node:
    """What owns the memory that the node shows."""
    source = source_of(node)
    while source is not None:
        node, source = source, source_of(source)
    return node


def _place(node: fx.Node) -> tuple[Any, ...]:
    regions = (node.meta.get(REGION), node.meta.get(CHECKPOINT), runs_without_gradients(node))
    return (*call_entries(node), *regions)


def _key(node: fx.Node, module: fx.GraphModule) -> str:
    """Equal for nodes that compute the same of the same."""
    names: Mapping[fx.Node, str] = {i: _name(i, module) for i in node.all_input_nodes}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda i: names[i])
    return repr((node.op, str(node.target), args, sorted(kwargs.items())))


def _name(node: fx.Node, module: fx.GraphModule) -> str:
    """The value by name; a view by what it shows, and a literal, which every use makes anew, by its numbers."""
    if is_whole_slice(node) and isinstance(node.args[0], fx.Node):
        return _name(node.args[0], module)
    if op_name(node) in SLICE or op_name(node) in LAYOUT or node.target is torch.tensor:
        return _key(node, module)
    source = node.args[0] if op_name(node) in _LITERAL else None
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return node.name
    literal = attrgetter(str(source.target))(module)
    if not isinstance(literal, torch.Tensor) or isinstance(literal, FakeTensor) or literal.is_meta:
        return node.name
    return repr((literal.dtype, literal.tolist())) if literal.numel() <= _LONGEST else node.name
