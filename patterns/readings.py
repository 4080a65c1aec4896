"""The sums of a graph and how their terms can be read as the state of a stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from resfx.patterns import dialect
from resfx.patterns.chain import Chain
from resfx.patterns.dialect import SLICE, data_inputs, op_name
from resfx.patterns.facts import Facts, identity_operand
from resfx.patterns.places import piece_taken
from resfx.patterns.slices import slice_base, strip
from resfx.patterns.streams import Term
from resfx.patterns.sums import affine_operand, factored_term, flatten, terms_of

_WIDEST = (
    32  # terms: a longer sum is an accumulator, and comparing all of its terms at every step would take quadratic time
)


@dataclass(frozen=True)
class Reading:
    """One way to read a term as the state: `carrier` is the value behind casts, views and scales (and, for a slice, behind those)."""

    term: Term
    carrier: Node
    region: tuple[Node, ...] = ()  # slice nodes from the whole state to the term, outermost first
    scaled: bool = False
    factors: tuple[Node, ...] = ()  # scale factors that vary: they must not depend on the state


@dataclass(frozen=True)
class Candidate:
    """A reading under which the sum `node` is a site. `source`: the value that the branches are computed from."""

    node: Node
    result: Node
    reading: Reading
    others: tuple[Term, ...]
    branches: tuple[Term, ...]
    source: Node
    direct: bool = True

    @property
    def start(self) -> Node:
        """Where the chain of states goes on backwards from: the skip operand, or the whole state that it is a slice of."""
        region = self.reading.region
        base = slice_base(region[0]) if region else None
        return base if base is not None else self.reading.term.operands[0]


def data_users(node: Node) -> list[Node]:
    """Who reads the numbers of `node`: not its shape alone, nor for a copy that nobody reads."""
    return [u for u in node.users if node in data_inputs(u) and (u.users or identity_operand(u) is None)]


class Sums:
    """All sums of one graph: `direct` terms as written, `flat` terms with inner sums resolved, readings of every term."""

    def __init__(self, graph: Graph, facts: Facts, chain: Chain) -> None:
        self._facts = facts
        self._chain = chain
        self._readings: dict[Term, list[Reading]] = {}
        self.direct: dict[Node, list[Term]] = {}
        self.constant: dict[Node, list[Term]] = {}  # the sums that no input reaches
        self.flat: dict[Node, list[Term]] = {}
        self.uses: dict[Node, int] = {}  # carrier -> sums that add it to something learned
        for node in graph.nodes:
            terms = terms_of(node)
            if terms is not None:
                (self.constant if node in facts.static else self.direct)[node] = terms
        for terms in self.direct.values():
            self._name_carriers(terms)
        for operand in {strip(o) for terms in self.constant.values() for t in terms for o in t.operands}:
            facts.bit(operand)

    def _name_carriers(self, terms: list[Term]) -> None:
        for term in terms:
            learned_others = any(o in self._facts.parametric for t in terms if t is not term for o in t.operands)
            for reading in self.readings(term):
                self._facts.bit(reading.carrier)
                self.uses[reading.carrier] = self.uses.get(reading.carrier, 0) + learned_others

    def readings(self, term: Term) -> list[Reading]:
        """The nearest first: a value that the branch reads directly is preferred to what it was made of."""
        if term not in self._readings:
            self._readings[term] = list(self._read(term))
        return self._readings[term]

    def _read(self, term: Term) -> Iterator[Reading]:
        """Through identities and scales, and through slices of a larger state; each value once, however many ways lead there."""
        todo = self._as_written(term)
        seen: set[Node] = set()
        while todo:
            reading = todo.pop()
            if reading.carrier in seen:
                continue
            seen.add(reading.carrier)
            is_sum = reading.carrier in self.direct
            operand = None if is_sum else identity_operand(reading.carrier)
            if operand is not None:
                todo.append(replace(reading, carrier=operand))
                continue
            yield reading
            behind = [*self._behind_shift(reading), *(() if is_sum else self._behind(reading))]
            todo.extend(reversed(behind))

    def _as_written(self, term: Term) -> list[Reading]:
        """The term, or x where it is the product x s inside addcmul, with a constant or a Parameter s."""
        if term.op == "value":
            return [Reading(term, term.operands[0], (), term.scale != 1)]
        operand, factor = factored_term(term, self._facts.static) or (None, 1)
        return [] if operand is None else [Reading(Term("value", (operand,), factor), operand, (), True)]

    def _behind_shift(self, reading: Reading) -> Iterator[Reading]:
        """Behind `x + b` or `s x + b`, where s and b are constants or Parameters: the branch may read x."""
        node = reading.carrier
        affine = affine_operand(node, self._facts.static)
        if affine is None:
            return
        operand, factor = affine
        shifted = node in self.direct and factor == 1
        if shifted or not reading.factors:  # `(1 - g) x`: g is the gate, and no state that x weighs
            yield replace(reading, carrier=operand, scaled=reading.scaled or factor != 1)

    def _behind(self, reading: Reading) -> Iterator[Reading]:
        node = reading.carrier
        for operand, factor, _ in self._chain.scaled_operands(node):
            if not isinstance(factor, Node) or dialect.same_shape(operand, node):
                varying = (factor,) if isinstance(factor, Node) and factor not in self._facts.static else ()
                factors = reading.factors + varying
                yield replace(reading, carrier=operand, scaled=True, factors=factors)
        piece = piece_taken(node)
        if piece is not None:
            yield replace(reading, carrier=piece)
        base = slice_base(node) if op_name(node) in SLICE else None
        if base is not None:
            yield replace(reading, carrier=base, region=(node, *reading.region))

    def flatten(self, node: Node, across_modules: bool) -> list[Term]:
        """The terms of `node`; an operand that is a sum nobody else reads, and no site, gives its own terms.

        A sum made in another module is first taken as one value: routed and shared experts are one branch. So is a very long one.
        """
        inner = {}
        for term in self.direct[node]:
            operand = term.operands[0]
            if operand not in self.flat or operand in self._chain.results or len(data_users(operand)) != 1:
                continue
            if len(self.flat[operand]) > _WIDEST:
                continue
            if across_modules or dialect.module_path(operand) == dialect.module_path(node):
                inner[operand] = self.flat[operand]
        return flatten(self.direct[node], inner)
