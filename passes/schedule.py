"""Reads that can be taken in one pass over the sources they have in common are.

What a routed read looks for doesn't depend on the input. So the sources that exist before the first of several reads are read once for all
of them (`ops.group_read`), and each read merges what it gets from there with the sources that came later. Only the graph counts here: which
lists of sources begin with the same nodes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import getitem
from typing import Any

from torch.fx import Node

from resfx.passes import group_kernels, ops
from resfx.passes.editor import Editor, value_of
from resfx.passes.marks import note_of
from resfx.patterns.sums import terms_of


@dataclass(frozen=True)
class _Read:
    """One read of the graph; `state` is what it adds the sources to."""

    node: Node
    state: Node | None
    sources: tuple[Node, ...]
    vectors: tuple[Node, Node]  # query, key_norm
    setting: tuple[Any, ...]  # eps, dim

    @property
    def size(self) -> int:
        """D."""
        return int(value_of(self.vectors[0]).shape[0])

    @property
    def arguments(self) -> tuple[Any, ...]:
        """With `routed_read`'s dtype, which has a default."""
        is_short = self.state is None and len(self.node.args) == 5
        return (*self.node.args, None) if is_short else self.node.args

    @property
    def kind(self) -> tuple[Any, ...]:
        """Reads of another kind are never in one group."""
        return self.sources[0], *self.setting


@dataclass(frozen=True)
class _Taken:
    """A group whose pass over its `common` first sources is in the graph; `total`: their sum from there, where it is needed."""

    reads: list[_Read]
    common: int
    node: Node
    total: Node | None


def group_reads(editor: Editor) -> None:
    """Put the reads of the graph into groups, where that moves fewer bytes."""
    chains: dict[tuple[Any, ...], list[_Read]] = defaultdict(list)
    for node in editor.graph.nodes:
        read = _read_at(node)
        if read is not None:
            chains[read.kind].append(read)
    groups = [group for chain in chains.values() for group in partition(chain) if len(group) > 1]
    before: _Taken | None = None
    for index, group in enumerate(groups):
        earlier = before if before is not None and _extends(group, before.reads) else None
        is_last = not any(_extends(after, group) for after in groups[index + 1 : index + 2])
        before = _take_together(editor, group, earlier, is_last)


def _extends(later: list[_Read], group: list[_Read]) -> bool:
    """Whether the common sources of one group are those of another and more."""
    known = _common(group)
    return later[0].kind == group[0].kind and _shared(group[0], later[0]) >= known and _common(later) > known


def _read_at(node: Node) -> _Read | None:
    if node.op != "call_function" or node.target not in (ops.delta_read, ops.routed_read):
        return None
    args: Any = node.args
    state = args[0] if node.target is ops.delta_read else None
    sources, query, key_norm, eps, dim = args[1:6] if state is not None else args[:5]
    return _Read(node, state, tuple(sources), (query, key_norm), (eps, dim))


def most_readers(size: int) -> int:
    """How many readers of D = `size` a group may have."""
    return max(min(group_kernels.MOST_READERS, group_kernels.MOST_ENTRIES // size), 1)


def partition(chain: list[_Read]) -> list[list[_Read]]:
    """The groups of consecutive reads that cost least, in order."""
    best = [(0, 0)]  # of the first reads: what they cost, and where the last of their groups begins
    crowd = _crowd(chain)
    for end in range(1, len(chain) + 1):
        starts = range(max(end - most_readers(chain[0].size), 0), end)
        costs = [(start, _cost(chain[start:end], chain[start].node in crowd)) for start in starts]
        best.append(min((best[start][0] + cost, start) for start, cost in costs if cost is not None))
    groups: list[list[_Read]] = []
    end = len(chain)
    while end:
        start = best[end][1]
        groups.insert(0, chain[start:end])
        end = start
    return groups


def _crowd(chain: list[_Read]) -> set[Node]:
    """The reads of the same sources as so many others that a compiler would put all of their gradients into one kernel too wide for it."""
    runs = [list(run) for _, run in groupby(chain, key=lambda read: read.sources)]
    return {read.node for run in runs if len(run) > group_kernels.MOST_READERS for read in run}


def _cost(group: list[_Read], is_crowded: bool) -> int | None:
    """How many tensors like the stream are read and written; None where the reads can't be taken together."""
    if len(group) == 1:
        return len(group[0].sources) + is_crowded  # what each read on its own keeps for its backward
    common, readers = _common(group), len(group)
    if not common or not all(_is_there(vector, group[0].node) for read in group for vector in read.vectors):
        return None
    partials = 2 * readers * len(group_kernels.read_launches(common))  # written, then read
    return common + partials + sum(len(read.sources) - common for read in group)


def _common(group: list[_Read]) -> int:
    """How many sources, from the first on, all reads have in common."""
    return min(_shared(read, later) for read, later in pairwise(group))


def _shared(read: _Read, later: _Read) -> int:
    """How many sources, from the first on, are the same."""
    size = min(len(read.sources), len(later.sources))
    if (
        read.sources[:size] == later.sources[:size]
    ):  # mostly; a search in Python would cost more than the lists themselves
        return size
    return next(i for i, (one, other) in enumerate(zip(read.sources, later.sources, strict=False)) if one is not other)


def _is_there(vector: Node, node: Node) -> bool:
    """Whether `vector` is known before `node` runs, or can be: an attribute can be fetched at any time."""
    return vector.op == "get_attr" or vector < node


def is_sum(state: Node, sources: Sequence[Node]) -> bool:
    """Whether `state` adds up `sources`, each once."""
    missing = Counter(sources)
    waiting = [state]
    while waiting:
        node = waiting.pop()
        if missing[node]:
            missing[node] -= 1
            continue
        if node.target is ops.sum_of:
            waiting.append(node.args[1])  # type: ignore[arg-type]
            continue
        terms = terms_of(node)
        if terms is None or any(term.op != "value" or term.scale != 1 for term in terms):
            return False
        waiting += [term.operands[0] for term in terms]
    return not missing.total()


def _take_together(editor: Editor, group: list[_Read], earlier: _Taken | None, is_last: bool) -> _Taken:
    """Put the pass over the common sources before the first of the reads. `earlier`: such a pass over some of them, the first ones."""
    first, common = group[0], _common(group)
    for read in group:
        for vector in read.vectors:
            if not vector < first.node:
                first.node.prepend(vector)
    editor.place_before(first.node, **note_of(first.node))
    queries, key_norms = zip(*(read.vectors for read in group), strict=True)
    own, vectors = list(first.sources[earlier.common if earlier else 0 : common]), (list(queries), list(key_norms))
    terms = [earlier.total, *own] if earlier and earlier.total else first.sources[:common]
    has_sum = first.state is not None and is_sum(first.state, terms)
    before: Node | list[Node] = editor.call(getitem, earlier.node, 0) if earlier else []
    shared = editor.call(ops.group_read, before, own, *vectors, *first.setting, has_sum, is_last)
    total = None
    if first.state is not None and has_sum:
        total = editor.call(ops.sum_of, editor.call(getitem, shared, 1), first.state)
        first.state.replace_all_uses_with(total, lambda user: total < user)
    for index, read in enumerate(group):
        found = editor.call(getitem, shared, 2 + index)
        read.node.args = (*read.arguments, found, common)
        read.node.target = ops.grouped_routed_read if read.state is None else ops.grouped_delta_read
    return _Taken(group, common, shared, total)
