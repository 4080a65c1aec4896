"""What a residual looks like. Reads graphs, never edits one.

`search(graph_module)` returns the streams, sites and near misses of a flat graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.fx import GraphModule, Node

from resfx.patterns.build import build, refresh
from resfx.patterns.errors import NoResidualFound, ResfxError
from resfx.patterns.openness import open_modules
from resfx.patterns.rejected import Rejected
from resfx.patterns.report import Loop, ResidualMap
from resfx.patterns.search import Search
from resfx.patterns.streams import Reader, Site, Stream

__all__ = [
    "Loop",
    "NoResidualFound",
    "Reader",
    "Rejected",
    "ResfxError",
    "ResidualMap",
    "Searched",
    "Site",
    "Stream",
    "open_modules",
    "refresh",
    "search",
]


@dataclass(frozen=True)
class Searched:
    """The streams of one graph and the sums that are no sites."""

    streams: list[Stream]
    rejected: list[Rejected]


def search(graph_module: GraphModule, *, unweighted: bool = False) -> Searched:
    """Find the residual streams of a flat graph whose `get_attr` nodes name the module's parameters and buffers.

    `unweighted`: branches without a Parameter count too. Linear in the size of the graph; nothing is changed.
    """

    def is_parameter(node: Node) -> bool:
        return node.op == "get_attr" and isinstance(_attribute(graph_module, str(node.target)), nn.Parameter)

    found = Search(graph_module.graph, is_parameter, unweighted).run()
    return Searched(build(found, graph_module.graph), found.rejected)


def _attribute(module: nn.Module, target: str) -> object:
    owner: object = module
    for name in target.split("."):
        owner = getattr(owner, name, None)
    return owner
