"""Following one residual stream backwards, from a state to the state before it.

`Chain.step(node)` tells what made `node` out of the previous state: a cast, a view, a scaled identity, a side add, or a
transition (a norm or activation, in one operation or written by hand). It stops at the results of sites and where the stream starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Graph, Node

from resfx.patterns import dialect
from resfx.patterns.dialect import ACTIVATION, LAYOUT, NORM, POINTWISE, data_inputs, op_name
from resfx.patterns.dominators import immediate_dominators
from resfx.patterns.facts import Facts, identity_operand
from resfx.patterns.places import piece_taken
from resfx.patterns.slices import added_to_part, parts_in_place, strip
from resfx.patterns.streams import Cast, Event, Layout, Scale, Side, Site, Term, Transition
from resfx.patterns.sums import affine_operand, terms_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Chain:
    """The backward steps of all streams of one graph; `results` maps a state to the site that made it."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self._graph = graph
        self._facts = facts
        self._steps: dict[Node, Event | None] = {}
        self._origins: dict[Node, Node] = {}  # where the chain of a state starts, as the results are now
        self._dominators: dict[Node | None, Node | None] | None = None
        self.results: dict[Node, Site] = {}
        self.owner: dict[Site, object] = {}  # the stream that holds a site, while the search runs
        self.controlled: dict[
            Node, tuple[Node, tuple[Site, ...]]
        ] = {}  # output of torch.cond -> state that entered, sites inside

    def add_result(self, site: Site) -> None:
        """`site.result` is a state from here on: no chain goes through it."""
        self.results[site.result] = site
        self._steps.pop(site.result, None)
        self._origins.clear()

    def drop_result(self, site: Site) -> None:
        del self.results[site.result]
        self._origins.clear()

    def cut(self, node: Node) -> None:
        """No state goes on into `node`, although one is among what it adds up."""
        self._steps[node] = None
        self._origins.clear()

    def step(self, node: Node) -> Event | None:
        """The event that ends in `node`, or None at a site's result and where nothing is known to carry the state."""
        if node in self.results:
            return None
        if node not in self._steps:
            self._steps[node] = self._find_step(node)
        return self._steps[node]

    def walk(self, node: Node) -> Iterator[Event]:
        """The events from `node` backwards to the nearest site's result, or to the start of the chain."""
        event = self.step(node)
        while event is not None:
            yield event
            event = self.step(event.before)

    def origin(self, node: Node) -> Site | None:
        """The site whose result `node` carries on, through casts, scales, side adds and transitions."""
        passed = [node]
        while passed[-1] not in self._origins:
            event = self.step(passed[-1])
            if event is None:
                break
            passed.append(event.before)
        first = self._origins.get(passed[-1], passed[-1])
        self._origins.update(dict.fromkeys(passed, first))
        return self.results.get(first)

    def _find_step(self, node: Node) -> Event | None:
        if node in self.controlled:
            before, sites = self.controlled[node]
            return Transition(before, node, (node.args[0], node), sites)  # type: ignore[arg-type]
        if node.op not in ("call_function", "call_method"):
            return None
        operand = identity_operand(node)
        if operand is not None:
            return Layout(operand, node) if op_name(node) in LAYOUT else Cast(operand, node)
        scale = self._scale_step(node)
        if scale is not None:
            return scale
        terms = terms_of(node)
        if terms is not None:
            return self._side_step(node, terms) or self._pointwise_step(node)
        name = op_name(node)
        if name in NORM or name in ACTIVATION:
            return self._unary_step(node)
        if name in ("cat", "slice_scatter", "select_scatter"):
            return self._parts_step(node) or self._added_step(node)
        piece = piece_taken(node)
        if piece is not None:
            return Cast(piece, node)
        return self._pointwise_step(node)

    def _added_step(self, node: Node) -> Event | None:
        """A part of the state to which something is added, and which is put back in its place."""
        found = added_to_part(node)
        if found is None or self.origin(found[0]) is None:
            return None
        before, add, part = found
        terms = tuple(term for term in terms_of(add) or () if strip(term.operands[0]) is not part)
        return Side(before, node, terms, (part,))

    def _parts_step(self, node: Node) -> Event | None:
        """A norm on a part of the state, which is put back in its place."""
        found = parts_in_place(node) if op_name(node) == "cat" else None
        if found is None or found[0] in self._facts.static:
            return None
        before, nodes = found
        return Transition(before, node, tuple(sorted(set(nodes), key=self._facts.order.__getitem__)))

    def _unary_step(self, node: Node) -> Event | None:
        operand = node.args[0] if node.args else None
        if not isinstance(operand, Node) or operand in self._facts.static:
            return None
        if op_name(node) == "clamp" and len([i for i in data_inputs(node) if i not in self._facts.static]) > 1:
            return None
        return Transition(operand, node, (node,))

    def scaled_operands(self, node: Node) -> list[tuple[Node, float | Node, bool]]:
        """(operand, factor, divide) for every reading of `node` as a scaled identity; more than one where both factors vary."""
        name = op_name(node)
        if name == "neg" and isinstance(node.args[0], Node):
            return [(node.args[0], -1.0, False)]
        if name not in ("mul", "div") or len(node.args) < 2 or "rounding_mode" in node.kwargs:
            return []
        left, right = node.args[0], node.args[1]
        if isinstance(left, Node) and isinstance(right, (int, float)):
            return [(left, right, name == "div")]
        if name == "mul" and isinstance(right, Node) and isinstance(left, (int, float)):
            return [(right, left, False)]
        if not isinstance(left, Node) or not isinstance(right, Node):
            return []
        pairs = [(left, right, name == "div")]
        if name == "mul":
            pairs.append((right, left, False))
        static = self._facts.static
        return [p for p in pairs if p[0] not in static]

    def _scale_step(self, node: Node) -> Event | None:
        readings = self.scaled_operands(node)
        if len(readings) == 2:  # both factors vary: the state is the one that a site made
            readings = [r for r in readings if self.origin(r[0]) is not None and self.origin(r[1]) is None]  # type: ignore[arg-type]
        if len(readings) != 1:
            return None
        operand, factor, divide = readings[0]
        if isinstance(factor, Node) and (self._shares_source(factor, operand) or not dialect.same_shape(operand, node)):
            return None
        return Scale(operand, node, factor, divide)

    def _shares_source(self, factor: Node, operand: Node) -> bool:
        return factor not in self._facts.static and self._facts.depends(factor, strip(operand))

    def _side_step(self, node: Node, terms: list[Term]) -> Event | None:
        """A sum that is no site: the stream goes on through the one term that carries a state."""
        carried: list[tuple[Term, Site]] = []
        for term in terms:
            site = (
                self.origin(term.operands[0])
                if term.op == "value" and dialect.as_large(term.operands[0], node)
                else None
            )
            if site is not None:
                carried.append((term, site))
        if not carried:
            operand, factor = affine_operand(node, self._facts.static) or (None, 1)
            if operand is None:
                return None
            if factor != 1:
                return Transition(operand, node, (node,))
            return Side(operand, node, tuple(t for t in terms if t.operands[0] is not operand))
        if len({id(self.owner[site]) for _, site in carried}) > 1:
            return None
        state, _ = max(carried, key=lambda pair: self._facts.order[pair[1].result])
        if state.scale != 1:
            return None
        return Side(state.operands[0], node, tuple(t for t in terms if t is not state))

    def _pointwise_step(self, node: Node) -> Event | None:
        """A norm written by hand: every path from one earlier value to `node` is pointwise or a reduction that is expanded again."""
        if op_name(node) not in POINTWISE:
            return None
        top = self._immediate_dominator(node)
        if top is None or not dialect.same_shape(top, node):
            return None
        region = self._region(node, top)
        if any(op_name(n) not in POINTWISE for n in region):
            return None
        return Transition(top, node, tuple(region))

    def _region(self, node: Node, top: Node) -> list[Node]:
        """The nodes strictly after `top` up to `node`, in graph order; stops being collected at the first foreign operation."""
        static, seen, todo = self._facts.static, {node}, [node]
        while todo:
            current = todo.pop()
            if op_name(current) not in POINTWISE:
                return [current]
            for i in data_inputs(current):
                if i is not top and i not in seen and i not in static:
                    seen.add(i)
                    todo.append(i)
        return sorted(seen, key=self._facts.order.__getitem__)

    def _immediate_dominator(self, node: Node) -> Node | None:
        if self._dominators is None:
            self._dominators = immediate_dominators(self._graph, self._facts.static)
        return self._dominators[node]
