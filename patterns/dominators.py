"""Immediate dominators of a graph: for each node the nearest earlier value that all it is computed from goes through.

A graph of operations has no cycles, so one pass in graph order does: a node's dominator is the nearest common ancestor of
its inputs in the tree of dominators built so far. Every node also points to one ancestor far up (Myers' skew-binary
jumps), which makes each look-up logarithmic, also over long skips.
"""

from __future__ import annotations

from collections.abc import Container
from functools import reduce

from torch.fx import Graph, Node

from resfx.patterns.dialect import data_inputs


def immediate_dominators(graph: Graph, static: Container[Node]) -> dict[Node | None, Node | None]:
    """Over the edges that carry data; None where nothing dominates the node. Nodes in `static` count as no input."""
    tree = _Tree()
    for node in graph.nodes:
        sources: list[Node | None] = [i for i in data_inputs(node) if i not in static]
        tree.add(node, reduce(tree.common, sources) if sources else None)
    return tree.parent


class _Tree:
    """A growing tree; None is its root."""

    def __init__(self) -> None:
        self.parent: dict[Node | None, Node | None] = {None: None}
        self._jump: dict[Node | None, Node | None] = {None: None}
        self._depth: dict[Node | None, int] = {None: 0}

    def add(self, node: Node, parent: Node | None) -> None:
        near = self._jump[parent]
        far = self._jump[near]
        equal_steps = self._depth[parent] - self._depth[near] == self._depth[near] - self._depth[far]
        self.parent[node] = parent
        self._jump[node] = far if equal_steps else parent
        self._depth[node] = self._depth[parent] + 1

    def common(self, a: Node | None, b: Node | None) -> Node | None:
        """The nearest common ancestor."""
        if self._depth[a] < self._depth[b]:
            a, b = b, a
        while self._depth[a] > self._depth[b]:
            near = self._jump[a]
            a = near if self._depth[near] >= self._depth[b] else self.parent[a]
        while a is not b:  # equal depths: both jump equally far
            apart = self._jump[a] is not self._jump[b]
            a, b = (self._jump[a], self._jump[b]) if apart else (self.parent[a], self.parent[b])
        return a
