"""Recurrences over the pieces of a sequence, told from streams: `S = S + k[:, t] * (v[:, t] - S k[:, t])`.

Written out, each step reads another piece of the same values, and the sum has the form of an update. It is a stream
only where weights of its own map the state from step to step, and the states of the steps follow each other.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

from torch.fx import Node

from resfx.patterns.alive import ancestors
from resfx.patterns.dialect import SLICE, SPLIT, data_inputs, op_name
from resfx.patterns.facts import Facts
from resfx.patterns.slices import strip
from resfx.patterns.streams import Site
from resfx.patterns.threads import Threads


def recurrent_sites(threads: Threads, facts: Facts) -> dict[Site, Node]:
    """The sites that are steps of such a recurrence, and the values whose pieces they read."""
    found: dict[Site, Node] = {}
    for steps in _repeated(threads):
        whole = _pieced(steps, threads, facts)
        if whole is not None:
            found.update(dict.fromkeys(steps, whole))
    return found


def _repeated(threads: Threads) -> list[list[Site]]:
    """Sites that run one branch several times, where that branch has no weights, or each has a stream for itself."""
    groups: dict[object, list[Site]] = defaultdict(list)
    for thread in threads.found:
        alone = len(thread.sites) == 1
        for site in thread.sites:
            if site in threads.carrier and (alone or not site.params):  # else it lies inside torch.cond
                groups[site.source, site.path, site.params, alone].append(site)
    return [sites for sites in groups.values() if len(sites) > 1]


def _pieced(steps: list[Site], threads: Threads, facts: Facts) -> Node | None:
    """The values of which each step reads another piece; None where there are none, or a branch without weights starts from data."""
    carriers = [threads.carrier[site] for site in steps]
    if not steps[0].params and not _is_constant(carriers[0]):
        return None
    if not all(facts.depends(second, first) for first, second in itertools.pairwise(carriers)):
        return None
    pieces = [_pieces(site, threads, facts) for site in steps]
    for whole in pieces[0]:
        places = [piece.get(whole) for piece in pieces]
        if None not in places and len(set(places)) == len(places):
            return whole
    return None


def _pieces(site: Site, threads: Threads, facts: Facts) -> dict[Node, tuple[object, ...]]:
    """What the branch reads beside the state: value -> which piece of it."""
    carrier = threads.carrier[site]
    region = threads.branch_region(site)
    beside = {
        i
        for node in region
        for i in data_inputs(node)
        if i not in facts.static and i is not carrier and not facts.depends(i, carrier)
    }
    pieces = (_piece_of(node, facts) for node in beside)
    return {piece[0]: piece[1:] for piece in pieces if piece is not None}


def _piece_of(node: Node, facts: Facts) -> tuple[Node, ...] | None:
    """(value, place, ..) of the piece that `node` was computed from and from nothing else."""
    while True:
        inputs = [i for i in data_inputs(node) if i not in facts.static]
        if len(inputs) != 1:
            return None
        if op_name(node) in SLICE or (op_name(node) == "getitem" and op_name(inputs[0]) in SPLIT):
            return (strip(inputs[0]), *node.args[1:])  # type: ignore[arg-type]
        node = inputs[0]


def _is_constant(node: Node) -> bool:
    """Do the value's numbers come from no input?"""
    return all(origin.op != "placeholder" for origin in ancestors([node], data_inputs))
