"""Floating dtypes that a capture wrote down: after `.to(dtype)` they may be wrong, and the graph can't tell.

`y.to(x.dtype)` and `y.float()` are one and the same in a float32 model. A dtype that no parameter has is meant as it stands.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain

import torch
from torch import fx, nn

from resfx.modes import ModeSwitch
from resfx.patterns.dialect import module_path, source_of

FixedDtypes = dict[torch.dtype, str]


def fixed_dtypes(module: nn.Module, graph: fx.Graph) -> FixedDtypes:
    """Every floating dtype that is written down in `graph`, or in a graph that it calls, and where."""
    found: FixedDtypes = {}
    for node in chain(graph.nodes, *(inner.graph.nodes for inner in inner_graphs(module, graph))):
        for value in _written(node):
            if value.is_floating_point and value not in found:
                name = str(getattr(node.target, "__name__", node.target))
                found[value] = f"`{name}` at `{module_path(node) or 'root'}`, {source_of(node) or node.name}"
    return found


def _written(node: fx.Node) -> Iterator[torch.dtype]:
    """The dtypes among the arguments of a node."""
    pending: list[object] = [*node.args, *node.kwargs.values()]
    for value in pending:  # grows below
        if isinstance(value, torch.dtype):
            yield value
        elif isinstance(value, (list, tuple)):
            pending.extend(value)
        elif isinstance(value, dict):
            pending.extend(value.values())


def inner_graphs(module: nn.Module, graph: fx.Graph) -> Iterator[fx.GraphModule]:
    """The graphs that `graph` calls: of mode switches and of branches (torch.cond)."""
    for node in graph.nodes:
        if node.op not in ("call_module", "get_attr"):
            continue
        value = operator.attrgetter(str(node.target))(module)
        if isinstance(value, ModeSwitch):
            yield from (value.in_train, value.in_eval)
        if node.op == "get_attr" and isinstance(value, fx.GraphModule):
            yield value
            yield from inner_graphs(value, value.graph)
