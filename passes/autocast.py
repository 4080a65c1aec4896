"""Autocast regions of a graph: a pair of calls that set a mode for all nodes between them. No node reads them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

# What torch.export itself puts into a graph for a region; there is no public name.
ENTER, EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast

Regions = dict[Node, tuple[Node, ...]]

_ENTER_LINE = re.compile(r"\w+(?:: [^=]+)? = [\w.]*_enter_autocast\((?P<setting>[^()]*)\)")
_EXIT_LINE = re.compile(r"\w+(?:: [^=]+)? = [\w.]*_exit_autocast\(")


def write_as_blocks(graph: Graph) -> None:
    """From now on the code of `graph` has a `with torch.autocast(..)` block for every region.

    The two calls leave the mode on where a line between them raises, and under torch.export they only note a region and set nothing.
    """
    graph.on_generate_code(lambda _: _as_blocks)


def _as_blocks(body: list[str]) -> list[str]:
    lines: list[str] = []
    depth = 0
    for line in "".join(body).split("\n"):
        indent = "    " * depth
        if entered := _ENTER_LINE.match(line):
            # A block without a line of its own would not parse.
            lines += [f"{indent}with torch.autocast({entered['setting']}):", f"{indent}    pass"]
            depth += 1
        elif _EXIT_LINE.match(line):
            depth -= 1
        else:
            lines.append(f"{indent}{line}" if line else line)
    return ["\n".join(lines)]


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
