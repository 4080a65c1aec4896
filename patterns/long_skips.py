"""`x + F(x)` around a whole stream that starts with x, told from an input that is injected into a running state.

Both add to a state what it began with. Around its stream goes the sum in which that stream ends, and x is added but once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from resfx.patterns import dialect
from resfx.patterns.chain import Chain
from resfx.patterns.event_nodes import event_nodes
from resfx.patterns.readings import Candidate, data_users
from resfx.patterns.streams import Event, Term
from resfx.patterns.threads import Threads


def long_skips(injected: Iterable[Candidate], threads: Threads, chain: Chain) -> list[Candidate]:
    """Of the sums that add a running state to an earlier value, those around a stream. Asked once all streams are known."""
    injected = list(injected)
    added = Counter(candidate.source for candidate in injected)
    return [c for c in injected if added[c.source] == 1 and _goes_round_its_stream(c, threads, chain)]


def _goes_round_its_stream(candidate: Candidate, threads: Threads, chain: Chain) -> bool:
    """Is the one other term what a stream ends in that starts with the candidate's state?"""
    term = candidate.others[0]
    site = chain.origin(term.operands[0]) if len(candidate.others) == 1 else None
    if site is None or candidate.reading.region or not dialect.as_large(candidate.start, candidate.node):
        return False
    thread = threads.of(site)
    if thread.entry is None or thread.sites[-1:] != [site]:
        return False
    starts = {thread.entry, *(event.before for event in chain.walk(thread.entry))}
    return candidate.source in starts and not is_read_beside(term, list(chain.walk(term.operands[0])))


def is_read_beside(term: Term, events: Sequence[Event]) -> bool:
    """Is the state that the term carries, and that went through `events`, read by others than the term's sum?"""
    on_the_way = set().union(*map(event_nodes, events))
    beside = any(user not in on_the_way for event in events for user in data_users(event.before))
    return beside or len(data_users(term.operands[0])) > 1
