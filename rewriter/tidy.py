"""Takes slices that cut nothing out of a functional graph: `x[:, 1:]` is traced as a whole slice of axis 0 first."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from resfx.patterns.facts import is_whole_slice


def drop_whole_slices(graph: fx.Graph, moved: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Erase them in place. Returns `moved` (old node -> node now) brought up to date."""
    dropped: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if is_whole_slice(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            dropped[node] = dropped.get(source, source)
    return {**{old: dropped.get(new, new) for old, new in moved.items()}, **dropped}
