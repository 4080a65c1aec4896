"""Sites taken in, one by one, and chained into streams while the search runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch.fx import Node

from resfx.patterns import dialect
from resfx.patterns.chain import Chain
from resfx.patterns.dialect import data_inputs
from resfx.patterns.facts import Facts
from resfx.patterns.readings import Candidate, Sums
from resfx.patterns.slices import rebuilt_whole, strip
from resfx.patterns.streams import Kind, Site, Term


@dataclass(eq=False)
class Thread:
    """A stream while it is being found: its sites in order and the values that carry its state."""

    sites: list[Site] = field(default_factory=list)
    states: set[Node] = field(default_factory=set)
    prefix: set[Node] = field(default_factory=set)  # values the entry was made of by casts, scales, norms and adds
    entry: Node | None = None
    bits: int = 0  # of its states


def _not_put_back(candidate: Candidate) -> str:
    if dialect.same_shape(candidate.start, candidate.result):
        return (
            "its parts are joined again in another order, and are no state that goes on:"
            " join them as they were, and change the order of the whole after it"
        )
    shapes = ", then ".join(str([*(dialect.shape_of(n) or ())]) for n in (candidate.start, candidate.result))
    return (
        f"the state it is put back into has another shape ({shapes}): let the part that is updated go on as a value of its own,"
        " and join what is new to it where a layer reads both"
    )


class Threads:
    """The sites found so far. `results` of the chain, masks of the facts and ties between sites are kept here."""

    def __init__(self, facts: Facts, chain: Chain, sums: Sums) -> None:
        self._facts = facts
        self._chain = chain
        self._sums = sums
        self._all: list[Thread] = []
        self._of: dict[Site, Thread] = {}
        self.carrier: dict[Site, Node] = {}
        self._latest: tuple[Site, set[Node]] | None = (
            None  # and its branch region: a sum that grows add by add asks again and again
        )

    @property
    def found(self) -> list[Thread]:
        return [thread for thread in self._all if thread.sites]

    def adopt(self, thread: Thread) -> None:
        """Take in a stream of a subgraph that passes through no stream of this graph."""
        self._all.append(thread)

    def of(self, site: Site) -> Thread:
        return self._of[site]

    def make_site(self, candidate: Candidate, kind: Kind) -> Site:
        """The site of a candidate; what it uses of Parameters is filled in by `branch_region`."""
        node, reading = candidate.node, candidate.reading
        site = Site(
            node=node, result=candidate.result, skip=reading.term.operands[0], terms=candidate.others, kind=kind,
            branches=self._branch_values(node, candidate.branches, candidate.source), params=frozenset(), region=reading.region,
            skip_scale=reading.term.scale, path=dialect.module_path(node), source=dialect.source_of(node),
            shape=dialect.shape_of(candidate.result) or (),
        )  # fmt: skip
        if reading.region and rebuilt_whole(node, reading.region, in_place=True) is not candidate.result:
            site.refused = _not_put_back(candidate)
        self.carrier[site] = reading.carrier
        return site

    def append(self, site: Site, start: Node, region: set[Node]) -> None:
        """Chain the site onto the stream whose state `start` carries, or start a stream with it."""
        thread = self._thread_for(site, start, region)
        thread.sites.append(site)
        self._of[site] = thread
        self._chain.owner[site] = thread
        self._chain.add_result(site)
        if thread.entry is None:
            thread.entry = self.carrier[site]
            thread.prefix = self._prefix(thread.entry)
        self._add_states(thread, {start, self.carrier[site], *(e.before for e in self._chain.walk(start)), site.result})
        self._facts.mask_foreign(site.result, thread.entry, thread.bits)

    def _add_states(self, thread: Thread, states: set[Node]) -> None:
        thread.states |= states
        thread.bits |= self._facts.bits_of(states)

    def grow(self, site: Site, node: Node, others: tuple[Term, ...], branches: tuple[Term, ...]) -> None:
        """The outer add `node` completes the site: its terms are branches of the same state."""
        self._chain.drop_result(site)
        site.node = site.result = node
        site.terms += others
        site.branches += self._branch_values(node, branches, self.carrier[site])
        site.path, site.source = dialect.module_path(node), dialect.source_of(node)
        self._chain.add_result(site)
        thread = self._of[site]
        self._add_states(thread, {node})
        if thread.entry is not None:
            self._facts.mask_foreign(node, thread.entry, thread.bits)
        self.branch_region(site)

    def _thread_for(self, site: Site, start: Node, region: set[Node]) -> Thread:
        """The thread whose state the site continues; a site nested in this site's branch gives its place up."""
        before = self._chain.origin(start)
        if before is None or before.refused:  # a refused slice ends in a state of another shape
            return self._new_thread()
        thread = self._of[before]
        if before is thread.sites[-1]:
            return thread
        position = thread.sites.index(before)
        later = thread.sites[position + 1 :]
        if later[0].result not in region:
            return self._new_thread()
        nested = self._new_thread()
        nested.entry, nested.sites = self.carrier[later[0]], later
        self._add_states(nested, {n for s in later for n in (s.skip, s.result, self.carrier[s])})
        del thread.sites[position + 1 :]
        for moved in later:
            self._of[moved] = self._chain.owner[moved] = nested
        return thread

    def _new_thread(self) -> Thread:
        self._all.append(Thread())
        return self._all[-1]

    def _prefix(self, entry: Node) -> set[Node]:
        """What the entry was made of by casts, scales, norms and adds: adding one of these again is an injection, not a branch."""
        seen, todo = {entry}, [entry]
        while todo:
            node = todo.pop()
            if node in self._chain.results:
                continue
            event = self._chain.step(node)
            before = [event.before] if event is not None else []
            before += [t.operands[0] for t in self._sums.direct.get(node, ()) if t.op == "value"]
            for earlier in before:
                if earlier not in seen:
                    seen.add(earlier)
                    todo.append(earlier)
        return seen

    # -- branches

    def _branch_values(self, node: Node, terms: Iterable[Term], carrier: Node) -> tuple[Node, ...]:
        """The branches behind the terms: a sum of two branches under one dropout or cast counts as two."""
        values: list[Node] = []
        for term in terms:
            learned = [t for t in self._terms_behind(term, node) if self._facts.learned(t, carrier, direct=False)]
            if len(learned) > 1:
                values.extend(self._branch_values(node, learned, carrier))
            else:
                values.append(term.operands[-1])
        return tuple(values)

    def _terms_behind(self, term: Term, node: Node) -> list[Term]:
        """The terms of a sum that stands behind casts and dropout, made in the same module as the add `node`."""
        inner = strip(term.operands[0])
        if (
            term.op != "value"
            or inner in self._chain.results
            or dialect.module_path(inner) != dialect.module_path(node)
        ):
            return []  # a sum made inside the branch's own module (routed and shared experts) is that branch's affair
        return self._sums.flat.get(inner, [])

    def branch_region(self, site: Site) -> set[Node]:
        """The nodes between the state and the update; the names of the Parameters they use go into `site.params`."""
        facts, carrier = self._facts, self.carrier[site]
        seen = self._latest[1] if self._latest is not None and self._latest[0] is site else set()
        new: set[Node] = set()
        todo = [o for t in site.terms for o in t.operands]
        while todo:
            node = todo.pop()
            if node in seen or node is carrier:
                continue
            seen.add(node)
            new.add(node)
            todo.extend(i for i in data_inputs(node) if i in facts.static or facts.depends(i, carrier))
        site.params |= {str(n.target) for n in new if facts.is_parameter(n)}
        self._latest = (site, seen)
        return seen
