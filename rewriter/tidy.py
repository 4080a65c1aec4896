"""Takes out what a trace writes down without need: slices that cut nothing, dtypes that a value has anyway."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from resfx.patterns.places import is_whole_slice


def drop_whole_slices(graph: fx.Graph, moved: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Erase them in place (`x[:, 1:]` is traced as a whole slice of axis 0 first).

    Returns `moved` (old node -> node now) brought up to date."""
    dropped: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if is_whole_slice(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            dropped[node] = dropped.get(source, source)
    return {**{old: dropped.get(new, new) for old, new in moved.items()}, **dropped}


def forget_kept_dtypes(graph: fx.Graph) -> None:
    """`x.to(device)` is traced with the dtype that x has anyway: leave it out, in place."""
    for node in graph.nodes:
        source = node.args[0].meta.get("val") if node.target is torch.ops.aten.to.dtype_layout else None
        if source is not None and node.kwargs.get("dtype") == source.dtype:
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dtype"}
