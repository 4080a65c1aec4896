"""Which stream of a Dynamo graph is which known stream: by module path, source line and order of its sites.

What does not fit is an error. A sum of a known stream that is in the graph and is no site there was cut off from its branch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from resfx.live_known import KnownStream, LiveError
from resfx.live_places import Look, Place, adds_of, is_sum, may_be, place_of
from resfx.patterns import Stream
from resfx.patterns.dialect import module_path, source_of


def at_known_places(nodes: Iterable[fx.Node], known: Iterable[KnownStream]) -> list[fx.Node]:
    """Those of `nodes` that are sums, and stand where a known stream has a site."""
    places = {site.place for stream in known for site in stream.sites}
    return [node for node in nodes if place_of(node) in places and is_sum(node)]


def match(
    sums: Sequence[fx.Node],
    found: Sequence[Stream],
    known: Sequence[KnownStream],
    names: Mapping[str, str],
    broke: str | None,
) -> list[tuple[KnownStream, Stream]]:
    """The known streams that a graph holds, each with the stream it is there, numbered as known.

    `sums`: the graph's sums at known places, `found`: its streams, both without what its outputs do not depend on. `names`: what
    the model calls the graph's Parameters first. Of known streams that look alike the first in `known` is taken.
    `broke`: where and why Dynamo ended this graph or one before it. Errors: LiveError where a part of a stream is missing.
    """
    free = list(found)
    pairs: list[tuple[KnownStream, Stream]] = []
    for stream in known:
        twin = next((s for s in free if _same(s, stream)), None) or next(
            (s for s in free if _same_params(s, stream, names)), None
        )
        if twin is not None:
            free.remove(twin)
            pairs.append((stream, _numbered(twin, stream)))
    _refuse_rest(sums, pairs, free, known, broke)
    return sorted(pairs, key=lambda pair: pair[0].index)


def _same(stream: Stream, known: KnownStream) -> bool:
    """The same sites in the same order. A line may differ: a model can write one sum twice, for two modes."""
    return [site.path for site in stream.sites] == [site.module for site in known.sites]


def _same_params(stream: Stream, known: KnownStream, names: Mapping[str, str]) -> bool:
    """The same Parameters in the same order of sites, wherever they are written: a program that was exported tells no modules."""
    here = [frozenset(names.get(name, name) for name in site.params) for site in stream.sites]
    return all(here) and here == [site.params for site in known.sites]


def _numbered(stream: Stream, known: KnownStream) -> Stream:
    for site, twin in zip(stream.sites, known.sites, strict=True):
        site.branch_id, site.repeats = twin.branch_id, twin.repeats
    axis = known.axis if known.axis is not None else stream.axis
    return replace(stream, index=known.index, axis=axis)


def _refuse_rest(
    sums: Sequence[fx.Node],
    pairs: Sequence[tuple[KnownStream, Stream]],
    free: Sequence[Stream],
    known: Sequence[KnownStream],
    broke: str | None,
) -> None:
    taken = {node for _, stream in pairs for site in stream.sites for node in adds_of(site)}
    left = _unexplained([node for node in sums if node not in taken], [stream for stream, _ in pairs], known)
    if not left:
        return
    sites = {site.node for stream in free for site in stream.sites}
    node = left[0]
    stream = next(s for s in known if _of(node, s))
    raise LiveError(_message(stream, [n for n in left if _of(n, stream)], sites, broke))


def _unexplained(left: Sequence[fx.Node], whole: Sequence[KnownStream], known: Sequence[KnownStream]) -> list[fx.Node]:
    """Those of `left` that may be a part of a stream: more than stand beside the streams that are here whole, and look so."""
    expected: dict[Place, float] = defaultdict(float)
    for site in (site for stream in whole for site in stream.sites):
        expected[site.place] += site.beside
    looks: dict[Place, set[Look]] = defaultdict(set)
    for site in (site for stream in known for site in stream.sites):
        looks[site.place] |= site.looks
    count = Counter(map(place_of, left))
    beyond = {spot for spot, number in count.items() if number > expected[spot] + 0.5}
    return [node for node in left if (spot := place_of(node)) in beyond and may_be(node, looks[spot])]


def _of(node: fx.Node, stream: KnownStream) -> bool:
    return place_of(node) in {site.place for site in stream.sites}


def _message(stream: KnownStream, nodes: Sequence[fx.Node], sites: set[fx.Node], broke: str | None) -> str:
    total = len(stream.sites)
    if any(site.beside for site in stream.sites):
        nodes = [node for node in nodes if node in sites] or nodes
    here = [(module_path(node), source_of(node)) for node in nodes]
    part = f"{len(here)} of its {total} sums ({_listed(here)})"
    name = f"stream {stream.index} ({_listed([(stream.sites[0].module, stream.sites[0].source)])})"
    head = f"{name} is in this graph only in part: {part}"
    if broke is not None:
        return (
            f"{head}. A graph break cut it: {broke}. Remove that break, or move it before the stream's first or behind its"
            " last site; resfx.detach gives the plain model back"
        )
    if len(here) > total:
        return (
            f"{name} is longer in this call than in the example of attach:"
            f" {len(here)} sums, not {total}. The call reads states that no output of the example depended on, or runs more layers"
            " or loops: attach with an example that does so too"
        )
    if len(here) != total:
        return (
            f"{head}. This call runs other layers than the example of attach did (a layer that is dropped at random, another"
            " number of loops): attach with an example that runs what you need"
        )
    unseen = next((place for node, place in zip(nodes, here, strict=True) if node not in sites), here[0])
    return (
        f"stream {stream.index}: the sums of this call are those of the example of attach, but {_listed([unseen])} is no residual"
        " update here; a part of the model was replaced since. Detach and attach again"
    )


def _listed(places: Sequence[tuple[str, str]]) -> str:
    shown = ", ".join(", ".join(filter(None, (path or "the root", source))) for path, source in places[:3])
    return shown + (f" and {len(places) - 3} more" if len(places) > 3 else "")
