"""Autocast regions of a graph: a pair of calls that set a mode for all nodes between them. No node reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

# What torch.export itself puts into a graph for a region; there is no public name.
ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast

Regions = dict[Node, tuple[Node, ...]]


def regions_of(graph: Graph) -> Regions:
    """For every node the calls that entered the regions it stands in, outermost first."""
    entered: list[Node] = []
    found: Regions = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.target is EXIT:
            entered.remove(node.args[0])
        found[node] = tuple(entered)
        if node.op == "call_function" and node.target is ENTER:
            entered.append(node)
    return found


class RegionWriter:
    """Enters and leaves copies of regions at the end of a graph that is being written."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._entered: list[tuple[Node, Node]] = []  # the original call, its copy

    def switch(self, wanted: Sequence[Node]) -> None:
        """What is written next stands in the regions that the calls `wanted` entered, outermost first."""
        shared = 0
        while shared < min(len(wanted), len(self._entered)) and self._entered[shared][0] is wanted[shared]:
            shared += 1
        while len(self._entered) > shared:
            self._graph.call_function(EXIT, (self._entered.pop()[1],))
        for enter in wanted[shared:]:
            self._entered.append((enter, self._graph.node_copy(enter)))
