"""Gated mixes of state and branch: `g * f(x) + (1 - g) * x`, also written as `x + g * (f(x) - x)`.

A gate is computed from the input through a weight. A number or a parameter in its place makes a scaled identity, which is a site.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.fx import Node

from resfx.patterns.chain import Chain
from resfx.patterns.facts import Facts, identity_operand
from resfx.patterns.readings import Reading, Sums, data_users
from resfx.patterns.slices import strip
from resfx.patterns.streams import Term


class Mixes:
    """Told sum by sum, in graph order: a difference is seen before the sum that it is added back by."""

    def __init__(self, facts: Facts, chain: Chain, sums: Sums) -> None:
        self._facts = facts
        self._chain = chain
        self._sums = sums
        self._differences: dict[Node, Node] = {}  # `f(x) - x` that is added to x again -> x

    def is_gated(self, reading: Reading, branches: Iterable[Term]) -> bool:
        """Does a gate weigh the state, or the difference between branch and state?"""
        carrier = reading.carrier
        if any(self._is_gate(factor, carrier) for factor in reading.factors):
            return True
        products = (product for term in branches for product in self._products(term))
        return any(self._differences.get(strip(a)) is carrier and self._is_gate(b, carrier) for a, b in products)

    def _is_gate(self, factor: Node, carrier: Node) -> bool:
        facts = self._facts
        return factor not in facts.static and (facts.depends(factor, carrier) or factor in facts.parametric)

    def _products(self, term: Term) -> Iterator[tuple[Node, Node]]:
        if term.op == "mul":
            yield from (term.operands, term.operands[::-1])  # type: ignore[misc]
        if term.op == "value":
            readings = self._chain.scaled_operands(strip(term.operands[0]))
            yield from ((operand, factor) for operand, factor, _ in readings if isinstance(factor, Node))

    def is_difference(self, node: Node, reading: Reading) -> bool:
        """Is the sum `f(x) - x`, and does it reach, through factors and casts alone, another sum with x?"""
        if reading.term.scale != -1 or not self.is_added_to(node, reading.carrier):
            return False
        self._differences[node] = reading.carrier
        return True

    def is_added_to(self, node: Node, carrier: Node) -> bool:
        """Does the value reach, through factors and casts alone, a sum with `carrier`?"""
        while len(users := data_users(node)) == 1:
            user = users[0]
            if user in self._sums.direct:
                others = [t for t in self._sums.direct[user] if t.operands[0] is not node]
                return any(reading.carrier is carrier for t in others for reading in self._sums.readings(t))
            operands = [identity_operand(user), *(operand for operand, _, _ in self._chain.scaled_operands(user))]
            if all(operand is not node for operand in operands):
                return False
            node = user
        return False
