"""Dataflow facts, computed in one pass in topological order.

For each node: is it made of parameters and constants only (`static`), does a Parameter reach it (`parametric`), and which
carriers (values that some sum adds as a term) it is computed from. Sets of carriers are bits of Python integers, so that the
whole pass stays linear: 50,000 nodes take a second, where one ancestor query per site would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from resfx.patterns import dialect
from resfx.patterns.dialect import CONTRACTION, IDENTITY, TO_SPECTRUM, data_inputs, op_name
from resfx.patterns.places import is_whole_slice
from resfx.patterns.streams import Term
from resfx.patterns.sums import adds_nothing


def identity_operand(node: Node) -> Node | None:
    """The operand that `node` merely casts, copies, views or expands; None where it computes something."""
    same = adds_nothing(node)
    if same is not None:
        return same
    name = op_name(node)
    if name in IDENTITY or is_whole_slice(node) or (name == "getitem" and _of_dropout(node)):
        operand = node.args[0] if node.args else node.kwargs.get("input")
        return operand if isinstance(operand, Node) else None
    return None


def _of_dropout(node: Node) -> bool:
    source, index = node.args
    return isinstance(source, Node) and op_name(source) == "native_dropout" and bool(index == 0)


def _is_complex(node: Node) -> bool:
    example = dialect.value(node)
    return isinstance(example, torch.Tensor) and example.is_complex()


class Reach(NamedTuple):
    """Bits of carriers that a value is computed from: at all, and through a weight (`direct`: past no foreign stream's state)."""

    depends: int
    direct: int
    learned: int


class Facts:
    """What each node of one graph depends on.

    Made in two steps: the constructor tells constants from data; carriers are then named with `bit`; then `visit` is called on
    the nodes in graph order, so that a search can mark the states of streams (`mask_foreign`) on the way.
    """

    def __init__(self, graph: Graph, is_parameter: Callable[[Node], bool], unweighted: bool = False) -> None:
        self.is_parameter = is_parameter
        self._unweighted = unweighted
        self._bits: dict[Node, int] = {}
        self.order: dict[Node, int] = {}
        self.static: set[Node] = set()
        self.parametric: set[Node] = set()
        self._spectra: set[Node] = set()  # frequencies of a signal, and what became of them
        self._depends: dict[Node, int] = {}
        self._direct: dict[Node, int] = {}  # as above, but not through the states of foreign streams
        self._learned: dict[Node, int] = {}
        self._learned_direct: dict[Node, int] = {}
        self._masks: dict[Node, int] = {}
        for node in graph.nodes:
            self.order[node] = len(self.order)
            self._visit_origin(node)

    def bit(self, carrier: Node) -> int:
        """The bit of a carrier; it must be asked for before the carrier is visited."""
        return self._bits.setdefault(carrier, 1 << len(self._bits))

    def visit(self, node: Node) -> None:
        # Indices, masks and sizes carry no state.
        inputs = list(data_inputs(node)) if dialect.holds_numbers(node) else []
        depends = direct = learned = learned_direct = 0
        for i in inputs:
            if i not in self._depends:
                continue
            depends |= self._depends[i]
            direct |= self._direct[i]
            learned |= self._learned[i]
            learned_direct |= self._learned_direct[i]
        own = self._bits.get(node, 0)
        if not depends and not own:
            return  # no entry: nothing to hand on
        if self._unweighted:
            learned, learned_direct = learned | depends, learned_direct | direct
        elif self._is_contraction(node):
            learned |= self._product(inputs, self._depends)
            learned_direct |= self._product(inputs, self._direct)
        self._depends[node], self._direct[node] = own | depends, own | direct
        self._learned[node], self._learned_direct[node] = learned, learned_direct
        if node in self._masks:
            self._apply_mask(node)

    def _visit_origin(self, node: Node) -> None:
        if node.op in ("get_attr", "placeholder"):
            if self.is_parameter(node):
                self.parametric.add(node)
                self.static.add(node)
            elif node.op == "get_attr":
                self.static.add(node)
            return
        if any(i in self.parametric for i in data_inputs(node)):
            self.parametric.add(node)
        if op_name(node) in TO_SPECTRUM or (self._of_spectrum(node) and _is_complex(node)):
            self._spectra.add(node)
        # Zeros of the batch's size vary with the input, though not with its numbers: a decoder's state can start from them.
        if node.op != "output" and all(i in self.static for i in node.all_input_nodes):
            self.static.add(node)

    def _of_spectrum(self, node: Node) -> bool:
        return any(i in self._spectra for i in data_inputs(node))

    def _product(self, operands: list[Node], depends: dict[Node, int]) -> int:
        """Carriers that meet a weight in a product: the other operand comes from a Parameter."""
        found = 0
        for weight in operands:
            if weight in self.parametric:
                others = self._union(depends, (o for o in operands if o is not weight))
                found |= others & ~depends.get(weight, 0)
        return found

    def _is_contraction(self, node: Node) -> bool:
        if op_name(node) in CONTRACTION or (op_name(node) == "mul" and self._of_spectrum(node)):
            return True
        if not dialect.is_custom(node):
            return False
        return any(i in self.parametric and i in self.static and self._is_matrix(i) for i in node.all_input_nodes)

    @staticmethod
    def _is_matrix(node: Node) -> bool:
        shape = dialect.shape_of(node)
        return shape is None or sum(size != 1 for size in shape) >= 2

    @staticmethod
    def _union(table: dict[Node, int], nodes: Iterable[Node]) -> int:
        return reduce(or_, (table.get(n, 0) for n in nodes), 0)

    def depends(self, node: Node, carrier: Node) -> bool:
        return bool(self._depends.get(node, 0) & self._bits.get(carrier, 0))

    def reach(self, term: Term) -> Reach:
        """All that the term is computed from, asked for once where many carriers are tried."""
        depends = self._union(self._depends, term.operands)
        return Reach(depends, self._learned_bits(term, direct=True), self._learned_bits(term, direct=False))

    def learned(self, term: Term, carrier: Node, direct: bool = True) -> bool:
        """Is the term computed from `carrier` through a weight; `direct`: on a path that no foreign stream's state cuts?"""
        return bool(self._learned_bits(term, direct) & self._bits.get(carrier, 0))

    def _learned_bits(self, term: Term, direct: bool) -> int:
        table, depends = (self._learned_direct, self._direct) if direct else (self._learned, self._depends)
        bits = self._union(table, term.operands)
        if self._unweighted:
            return bits | self._union(depends, term.operands)
        return bits | self._product(list(term.operands), depends) if term.op in ("mm", "bmm") else bits

    def bits_of(self, carriers: Iterable[Node]) -> int:
        return self._union(self._bits, carriers)

    def mask_foreign(self, state: Node, entry: Node, own: int) -> None:
        """`state` counts as computed, from here on, from what its stream's entry and own states (their bits) were made of."""
        self._masks[state] = self._direct.get(entry, 0) | own | self._bits.get(state, 0)
        if state in self._direct:
            self._apply_mask(state)

    def _apply_mask(self, state: Node) -> None:
        self._direct[state] &= self._masks[state]
        self._learned_direct[state] &= self._masks[state]
