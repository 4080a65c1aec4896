"""The search: which sums of a graph are residual updates `x + f(x)`, and how they chain into streams.

A sum is a site where one term carries the running state and another is computed from that state through a learned weight.
Sums are taken in graph order, once. What is no site though it looks like one is kept, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch.fx import Graph, GraphModule, Node

from resfx.patterns import dialect
from resfx.patterns.alive import ancestors
from resfx.patterns.chain import Chain
from resfx.patterns.dialect import data_inputs, op_name
from resfx.patterns.distances import is_distance
from resfx.patterns.facts import Facts, Reach
from resfx.patterns.long_skips import is_read_beside, long_skips
from resfx.patterns.mixes import Mixes
from resfx.patterns.readings import Candidate, Reading, Sums, data_users
from resfx.patterns.recurrences import recurrent_sites
from resfx.patterns.rejected import Rejected
from resfx.patterns.resolution import Resolution
from resfx.patterns.slices import parts_of, rebuilt_whole, same_source, strip
from resfx.patterns.streams import Kind, Side, Site, Term
from resfx.patterns.sums import cancels, stacked_without_nans
from resfx.patterns.threads import Thread, Threads

_MERGE = "what is added to {} comes back from another resolution: an encoder-decoder merge"
_RECURRENCE = "a step of a recurrence: each step reads another piece of {}, and no weight of its own maps its state"


_CANCELS = "{} is added and subtracted again: nothing of it is left in the sum"
_INJECTED = "{} is itself a running state: {} is injected into it"
_INJECTED_AHEAD = "{} goes on as the state, updated by what is computed from this sum: {} is only injected into it"
_CONSTANT = "it is made of parameters alone: no input has reached {}, and no state runs on yet"
_NANSUM = "nansum leaves out what is no number: it is no plain sum"


@dataclass
class Found:
    """What the search found in one graph. `sums`: every sum of two or more varying terms, with its verdict."""

    threads: list[Thread]
    facts: Facts
    chain: Chain
    sums: dict[Node, Site | Rejected]

    @property
    def rejected(self) -> list[Rejected]:
        return [verdict for verdict in self.sums.values() if isinstance(verdict, Rejected)]


class Search:
    """One search over one graph."""

    def __init__(self, graph: Graph, is_parameter: Callable[[Node], bool], unweighted: bool = False) -> None:
        self._graph = graph
        self._unweighted = unweighted
        self._facts = Facts(graph, is_parameter, unweighted)
        self._chain = Chain(graph, self._facts)
        self._sums = Sums(graph, self._facts, self._chain)
        self._threads = Threads(self._facts, self._chain, self._sums)
        self._mixes = Mixes(self._facts, self._chain, self._sums)
        self._resolution = Resolution(graph, self._facts)
        self._verdicts: dict[Node, Site | Rejected] = {}
        self._loose: set[Node] = set()  # sums in which no term is computed from another one
        self._injected: dict[Node, Candidate] = {}  # sums that add a running state to an earlier value

    def run(self) -> Found:
        for node in self._graph.nodes:
            self._facts.visit(node)
            if node in self._sums.direct:
                self._judge(node)
            elif op_name(node) == "mul":
                self._chain.step(node)  # in graph order, like the sums: what a step asks about earlier ones is known
            elif node in self._sums.constant:
                self._refuse_constant(node)
            elif op_name(node) == "cond":
                self._enter_cond(node)
            elif stacked_without_nans(node):
                self._verdicts[node] = Rejected(node, "structure", _NANSUM)
        self._drop_lone_merges()
        self._drop_recurrences()
        self._take_long_skips()
        return Found(self._threads.found, self._facts, self._chain, self._verdicts)

    # -- the verdict on one sum

    def _refuse_constant(self, node: Node) -> None:
        """A sum of parameters in the form of an update, `q + f(q)`: the same in every call."""
        terms = self._sums.constant[node]
        for operand in (strip(t.operands[0]) for t in terms if t.op == "value"):
            if any(self._facts.learned(t, operand) for t in terms if strip(t.operands[0]) is not operand):
                self._verdicts[node] = Rejected(node, "structure", _CONSTANT, (operand,))

    def _judge(self, node: Node) -> None:
        if self._merge(node):
            return
        near = self._sums.flatten(node, across_modules=False)
        self._sums.flat[node] = terms = self._sums.flatten(node, across_modules=True)
        verdict = self._find_site(node, near)
        if not isinstance(verdict, Candidate) and len(terms) != len(near):
            verdict = self._find_site(node, terms)
        if isinstance(verdict, Candidate):
            self._accept(verdict)
            return
        if verdict is not None:
            self._verdicts[node] = verdict
            if verdict.stage == "structure":
                self._loose.add(node)
        self._chain.step(node)  # asked for in graph order, so that a long chain of adds never recurses

    def _merge(self, node: Node) -> bool:
        """`(x + a(x)) + b(x)`: branches that read the same state are one site, completed by the outer add."""
        for term in self._sums.direct[node]:
            inner, site = self._unread_site(term)
            if site is None:
                continue
            terms = self._sums.flatten(node, across_modules=False)
            others = tuple(t for t in terms if t.operands[0] is not site.result)
            more = tuple(t for t in others if self._facts.learned(t, self._threads.carrier[site]))
            if more and len(others) == len(terms) - 1:
                for grown in (site.node, *inner):
                    self._verdicts.pop(grown, None)
                self._threads.grow(site, node, others, more)
                self._verdicts[node] = site
                return True
        return False

    def _unread_site(self, term: Term) -> tuple[list[Node], Site | None]:
        """The site whose result the term is, if nobody else reads it; side adds in between (the nodes) are passed."""
        passed: list[Node] = []
        value = term.operands[0]
        while term.op == "value" and term.scale == 1 and len(data_users(value)) == 1:
            site = self._chain.results.get(value)
            if site is not None:
                return passed, site if site.result is site.node else None
            step = self._chain.step(value) if value in self._sums.direct else None
            if not isinstance(step, Side):
                break
            passed.append(value)
            value = step.before
        return [], None

    def _find_site(self, node: Node, terms: list[Term]) -> Candidate | Rejected | None:
        varying = [t for t in terms if any(o not in self._facts.static for o in t.operands)]
        reached = [(t, self._facts.reach(t)) for t in terms]
        shared = _in_two(reach.depends for _, reach in reached)
        misses: list[Rejected] = []
        found: list[Candidate] = []
        for term in terms if varying else ():
            nearest: Candidate | None = None
            for reading in self._sums.readings(term):
                if not self._facts.bit(reading.carrier) & shared:
                    continue  # no other term has to do with that state
                if nearest is not None and not reading.region:
                    continue
                outcome = self._try(node, reading, [(t, reach) for t, reach in reached if t is not term])
                if isinstance(outcome, Candidate):
                    nearest = outcome
                    found.append(outcome)
                elif outcome is not None:
                    misses.append(outcome)
        if found:
            return max(found, key=self._preference)
        if len(varying) < 2:
            return None
        if misses:
            return next((miss for miss in misses if miss.stage != "learned"), misses[0])  # what came nearest
        return Rejected(node, "structure", "no term of the sum is computed from another one")

    def _preference(self, candidate: Candidate) -> tuple[bool, bool, bool, int]:
        """A direct reading before one through a foreign stream, the whole state before a part of it that is put back,
        one that continues a stream, then the earliest state."""
        continues = self._chain.origin(candidate.start) is not None
        whole = bool(candidate.reading.region) and dialect.same_shape(candidate.start, candidate.result)
        return candidate.direct, whole, continues, -self._facts.order[candidate.source]

    def _try(self, node: Node, reading: Reading, others: list[tuple[Term, Reach]]) -> Candidate | Rejected | None:
        """Is the sum an update of the state that `reading` names? None: no term has to do with that state at all."""
        carrier, bit = reading.carrier, self._facts.bit(reading.carrier)
        related = [(t, reach) for t, reach in others if reach.depends & bit]
        if not related:
            return None
        direct = [t for t, reach in related if reach.direct & bit]
        branches = direct or [t for t, reach in related if reach.learned & bit]
        if not branches:
            return Rejected(node, "learned", "what is added to {} meets no weight on its way from there", (carrier,))
        added = tuple(t for t, _ in others)
        candidate = Candidate(node, node, reading, added, tuple(branches), carrier, bool(direct))
        miss = self._miss(node, reading, branches, bool(direct))
        if miss is not None:
            if miss.template == _INJECTED:
                self._injected.setdefault(node, candidate)
            return miss
        result = rebuilt_whole(node, reading.region) if reading.region else node
        if result is None and self._is_read_whole(branches, carrier):
            reading, result = replace(reading, region=()), node  # the part goes on as a state by itself
        if result is None:
            return Rejected(node, "structure", "a part of {} is added to, and not put back into it", (carrier,))
        return replace(candidate, result=result, reading=reading)

    def _miss(self, node: Node, reading: Reading, branches: list[Term], direct: bool) -> Rejected | None:
        """What forbids to call the sum a site although a branch is computed from the state."""
        carrier = reading.carrier
        if cancels(reading.term.operands[0], self._sums.flat[node]):
            self._chain.cut(node)
            return Rejected(node, "structure", _CANCELS, (carrier,))
        if self._mixes.is_gated(reading, branches):
            return Rejected(
                node, "structure", "a gated mix: {} is weighted by a value computed from the input", (carrier,)
            )
        if self._mixes.is_difference(node, reading):
            return Rejected(
                node, "structure", "a difference from {} that is added to it: that add mixes the two", (carrier,)
            )
        if is_distance(node, self._sums.direct[node]):
            return Rejected(
                node, "structure", "a distance from {}: only the size of the difference is read", (carrier,)
            )
        if not direct and self._sums.uses[carrier] > 1:
            return Rejected(node, "order", "{} is added again and again: a bias of another stream's branch", (carrier,))
        state = next((t for t in branches if self._is_running_state(t, carrier)), None)
        if state is not None:
            return Rejected(node, "order", _INJECTED, (state.operands[0], carrier))
        if self._goes_round_a_stream(branches, carrier):
            return Rejected(node, "shape", _MERGE, (carrier,))
        state = next((t for t in branches if self._goes_on_beside(t, node, carrier)), None)
        if state is not None:
            return Rejected(node, "order", _INJECTED_AHEAD, (state.operands[0], carrier))
        skip = reading.term.operands[0]
        if not dialect.as_large(skip, node):
            shapes = (str([*(dialect.shape_of(n) or ())]) for n in (node, skip))
            return Rejected(node, "shape", "the sum has another shape than its term {}: {}, and {}", (skip, *shapes))
        return None

    def _is_read_whole(self, branches: list[Term], carrier: Node) -> bool:
        """Is there a way from `carrier` to the branches that does not lead through a part of it?"""
        return carrier in self._resolution.way(branches, carrier, parts_of(carrier))

    def _is_running_state(self, term: Term, carrier: Node) -> bool:
        """Does the term carry a stream's state that already holds the carrier, or that lives on beside this sum?

        What was made of the carrier itself since its own site (norms of it, with maps of it added) is none: a branch.
        """
        if term.op != "value":
            return False
        site = self._chain.origin(term.operands[0])
        if site is None:
            return False
        events = list(self._chain.walk(term.operands[0]))
        if carrier in (term.operands[0], *(event.before for event in events)):
            return False
        thread = self._threads.of(site)
        return carrier in thread.states or carrier in thread.prefix or is_read_beside(term, events)

    def _goes_on_beside(self, term: Term, node: Node, carrier: Node) -> bool:
        """Is the term itself updated, `u + g(x + u)`, by what is computed from the sum `node`, which no sum adds to anything?

        `x + (u + g(x + u))` adds both to the state at last, and so updates that.
        """
        value = term.operands[0]
        if term.op != "value" or self._sums.uses.get(node):
            return False
        later = (user for user in data_users(value) if user is not node and user in self._sums.direct)
        return any(self._reads(user, node) and not self._mixes.is_added_to(user, carrier) for user in later)

    def _reads(self, later: Node, node: Node) -> bool:
        """Is `later`, which the facts may not have reached yet, computed from `node`?"""
        order = self._facts.order
        return node in ancestors([later], lambda n: (i for i in data_inputs(n) if order[i] >= order[node]))

    def _goes_round_a_stream(self, branches: list[Term], carrier: Node) -> bool:
        if not self._resolution.comes_back(branches, carrier):
            return False
        inside = self._resolution.way(branches, carrier) - {carrier}
        return any(node in self._chain.results for node in inside)

    def _drop_lone_merges(self) -> None:
        """Merges of two resolutions whose stream holds nothing else: no stream at all."""
        for thread in self._threads.found:
            carriers = self._threads.carrier
            own = [site for site in thread.sites if site in carriers]
            if own and own == thread.sites and all(self._resolution.comes_back(s.terms, carriers[s]) for s in own):
                self._verdicts.update({s.node: Rejected(s.node, "shape", _MERGE, (carriers[s],)) for s in own})
                thread.sites.clear()

    def _drop_recurrences(self) -> None:
        for site, whole in recurrent_sites(self._threads, self._facts).items():
            self._threads.of(site).sites.remove(site)
            self._verdicts[site.node] = Rejected(site.node, "order", _RECURRENCE, (whole,))

    def _take_long_skips(self) -> None:
        verdicts = ((self._verdicts.get(node), candidate) for node, candidate in self._injected.items())
        injected = [c for verdict, c in verdicts if isinstance(verdict, Rejected) and verdict.template == _INJECTED]
        for candidate in long_skips(injected, self._threads, self._chain):
            self._accept(candidate)

    # -- taking a site in

    def _accept(self, candidate: Candidate) -> None:
        reading = candidate.reading
        kind: Kind = "slice" if reading.region else "scaled" if reading.scaled else "plain"
        site = self._threads.make_site(candidate, kind)
        self._verdicts[candidate.node] = site
        region = self._threads.branch_region(site)
        self._pair_coupling(site, region)
        self._threads.append(site, candidate.start, region)
        before = self._threads.of(site).sites[-2:-1]
        if not candidate.direct and before and before[0].kind == "coupling":
            site.kind = "coupling"

    def _pair_coupling(self, site: Site, region: set[Node]) -> None:
        """Reversible coupling `y1 = x1 + F(x2); y2 = x2 + G(y1)`: the first sum reads only the other half, and is a site all the same."""
        for node in sorted(self._loose & region, key=self._facts.order.__getitem__):
            first = self._first_of_coupling(node, site)
            if first is not None:
                site.kind = "coupling"
                self._verdicts[node] = made = self._threads.make_site(first, "coupling")
                self._threads.append(made, first.start, self._threads.branch_region(made))

    def _first_of_coupling(self, node: Node, second: Site) -> Candidate | None:
        carrier = self._threads.carrier[second]
        terms = self._sums.flat[node]
        for term in terms:
            others = tuple(t for t in terms if t is not term)
            branches = tuple(t for t in others if self._facts.learned(t, carrier))
            if branches and term.op == "value" and same_source(term.operands[0], second.skip):
                return Candidate(node, node, Reading(term, term.operands[0]), others, branches, carrier)
        return None

    # -- control flow

    def _enter_cond(self, node: Node) -> None:
        """Sites inside torch.cond: found, counted in the stream that passes through, never rewritten."""
        module = self._graph.owning_module
        _, *branches, operands = node.args
        for branch in branches:
            sub = getattr(module, str(branch.target), None) if isinstance(branch, Node) else None
            if not isinstance(sub, GraphModule) or not isinstance(operands, (tuple, list)):
                continue
            inputs = dict(zip((n for n in sub.graph.nodes if n.op == "placeholder"), operands, strict=False))
            found = Search(sub.graph, _is_learned_operand(inputs, self._facts), self._unweighted).run()
            self._verdicts.update(found.sums)
            for thread in found.threads:
                self._take_in(node, thread, found, sub.graph, inputs)

    def _take_in(self, node: Node, thread: Thread, found: Found, graph: Graph, inputs: dict[Node, object]) -> None:
        for site in thread.sites:
            site.refused = "it lies inside a torch.cond branch"
        outer = inputs.get(strip(thread.entry)) if thread.entry is not None else None
        outputs = enumerate(graph.output_node().all_input_nodes)
        position = next((i for i, value in outputs if found.chain.origin(value) is thread.sites[-1]), None)
        user = next((u for u in node.users if op_name(u) == "getitem" and u.args[1] == position), None)
        if isinstance(outer, Node) and user is not None:
            self._chain.controlled[user] = (outer, tuple(thread.sites))
        else:
            self._threads.adopt(thread)


def _in_two(masks: Iterable[int]) -> int:
    """The bits that are set in two or more of the masks."""
    seen = twice = 0
    for mask in masks:
        twice |= seen & mask
        seen |= mask
    return twice


def _is_learned_operand(inputs: dict[Node, object], facts: Facts) -> Callable[[Node], bool]:
    return lambda node: (outer := inputs.get(node)) in facts.parametric and outer in facts.static
