"""Where the sums of known streams stand, and which sums stand beside them.

A line of source may hold several sums: `x + gate * f(norm(x) * (1 + scale) + shift)` has a site and two others. In a graph that
holds the whole stream they are told by the stream itself; in any other by what the example showed of the site's own sums.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from torch import fx, nn

from resfx.failure import is_machinery
from resfx.patterns import Site, Stream
from resfx.patterns.dialect import module_path, same_shape, source_of
from resfx.patterns.sums import terms_of

Place: TypeAlias = tuple[str, str]  # module path and source line
Look: TypeAlias = tuple[bool, ...]  # of a sum: whether each term is as large as the sum, in sorted order


def place_of(node: fx.Node) -> Place:
    """Where the node was made. Dynamo keeps no line of a layer of torch's own, so that such a line is "" here."""
    return place(module_path(node), source_of(node))


def place(path: str, source: str) -> Place:
    """As `place_of`, of a path and a source line."""
    return path, "" if is_machinery(source) else source


def is_sum(node: fx.Node) -> bool:
    """Does the node add two tensors or more?"""
    return node.op in ("call_function", "call_method") and len(terms_of(node) or ()) > 1


def adds_of(site: Site) -> set[fx.Node]:
    """The adds that make up a site's sum: one, or several where it has many terms."""
    found: set[fx.Node] = set()
    todo = [site.node]
    while todo:
        node = todo.pop()
        found.add(node)
        todo += [
            i for i in node.all_input_nodes if i not in found and i is not site.skip and is_sum(i) and _near(i, site)
        ]
    return found


def _near(node: fx.Node, site: Site) -> bool:
    """Was the node made by the module that made the site?"""
    return module_path(node) == site.path


def looks_of(site: Site) -> frozenset[Look]:
    """What the sums look like that a site consists of."""
    return frozenset(look for node in adds_of(site) if (look := _look(node)) is not None)


def _look(node: fx.Node) -> Look | None:
    terms = terms_of(node)
    return None if terms is None else tuple(sorted(same_shape(term.operands[0], node) for term in terms))


def may_be(node: fx.Node, looks: Iterable[Look]) -> bool:
    """May `node` be a sum that looked like one of `looks`? What is broadcast in one call may be full size in another."""
    own = _look(node)
    return own is not None and any(own == look or (all(own) and len(own) == len(look)) for look in looks)


class Census:
    """The sums among the nodes of a graph that is about to be edited, and those of its `streams`. `names` as first_names gives."""

    def __init__(self, nodes: Iterable[fx.Node], streams: Iterable[Stream], names: Mapping[str, str]) -> None:
        self._places = {node: _named(place_of(node), names) for node in nodes if is_sum(node)}
        self._own = {stream.index: set().union(*map(adds_of, stream.sites)) for stream in streams}

    def beside(self, streams: Iterable[int]) -> Counter[Place]:
        """How many sums stand at every place that are none of these streams'."""
        own = set().union(*(self._own[index] for index in streams))
        return Counter(spot for node, spot in self._places.items() if node not in own)


def _named(spot: Place, names: Mapping[str, str]) -> Place:
    return names.get(spot[0], spot[0]), spot[1]


def first_names(model: nn.Module) -> dict[str, str]:
    """Of every path of a module or Parameter the first one that leads to the same: layers may be registered under several names."""
    first: dict[int, str] = {}
    modules = model.named_modules(remove_duplicate=False)
    tensors = model.named_parameters(remove_duplicate=False)
    return {path: first.setdefault(id(found), path) for path, found in (*modules, *tensors)}
