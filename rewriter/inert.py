"""Dropout in eval mode returns its input, the very tensor: torch.export lets every later reader of the input read the dropout.

The eval graph alone can't tell who reads which. The train graph can: there the two are different tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

aten = torch.ops.aten

_DROPOUTS = (
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)


def handed_back(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Every dropout that is switched off -> its input."""
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.target not in _DROPOUTS:
            continue
        source, _, train = node.args
        if train is False and isinstance(source, fx.Node):
            found[node] = source
    return found


def moved(back: Mapping[fx.Node, fx.Node], mapping: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """The same for a folded graph; `mapping` takes its old nodes to what they are now."""
    return {mapping.get(node, node): mapping.get(source, source) for node, source in back.items()}


def is_same(value: fx.Node, other: fx.Node | None, back: Mapping[fx.Node, fx.Node]) -> bool:
    """Is `value` the tensor `other`, handed back by any number of dropouts?"""
    while value is not other and value in back:
        value = back[value]
    return value is other
