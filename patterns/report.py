"""What was found, as a user reads it: `ResidualMap` prints tables and explains single adds."""

from __future__ import annotations

import difflib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.fx import Node

from resfx.patterns.dialect import module_path, source_of
from resfx.patterns.errors import UnknownPlace
from resfx.patterns.rejected import Rejected
from resfx.patterns.streams import Site, Stream


@dataclass(frozen=True)
class Loop:
    """A weight-tied repeat: `branches` distinct branches (L) of one stream, each run `count` times (N) in one forward pass."""

    stream: int
    count: int
    branches: int
    sites: tuple[int, ...]


@dataclass
class ResidualMap:
    """The streams of one model, their sites, and what was refused and why. `print` it for a table."""

    streams: list[Stream]
    rejected: list[Rejected]
    notes: list[str] = field(default_factory=list)
    refused: dict[int, str] = field(default_factory=dict)  # stream -> why it was left plain by a rewrite
    forms: dict[int, str] = field(default_factory=dict)  # stream -> the form it was rewritten to
    chosen: dict[int, tuple[int, ...]] = field(default_factory=dict)  # stream -> its sites that a rewrite took
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)  # new parameters and their shapes
    changes: dict[str, int] = field(default_factory=dict)  # what the passes changed, counted
    modules: tuple[str, ...] = ()  # paths of all modules of the model

    def __deepcopy__(self, memo: dict[int, Any]) -> ResidualMap:
        """Itself: a record, whose nodes belong to a graph that can't be copied with it."""
        return self

    @property
    def sites(self) -> list[Site]:
        """All sites of all streams, stream by stream."""
        return [site for stream in self.streams for site in stream.sites]

    @property
    def loops(self) -> list[Loop]:
        """Weight-tied repeats, found by parameter identity."""
        return list(self._loops())

    def _loops(self) -> Iterator[Loop]:
        for stream in self.streams:
            tied = [site for site in stream.sites if site.repeats > 1]
            for count in sorted({site.repeats for site in tied}):
                sites = [site for site in tied if site.repeats == count]
                yield Loop(stream.index, count, len({s.branch_id for s in sites}), tuple(s.index for s in sites))

    def explain(self, path: str) -> str:
        """Why each add of module `path` (or at `file:line`, or a node's name) is or is no site.

        Errors: UnknownPlace, with the nearest places, where the model has no such module or source file.
        """
        lines = [
            self._site_line(stream, site) for stream in self.streams for site in stream.sites if _is_at(site, path)
        ]
        lines += [_rejected_line(r) for r in self.rejected if path in (r.path, r.node.name) or _ends(r.source, path)]
        if lines:
            return "\n".join(lines)
        self._check_place(path)
        return f"no sum of two or more computed terms at {path!r}"

    def _check_place(self, path: str) -> None:
        sources = [site.source for site in self.sites] + [rejected.source for rejected in self.rejected]
        file, _, line = path.rpartition(":")
        if path in self.modules or (line.isdigit() and any(_names_file(source, file) for source in sources)):
            return
        lines = [source.rsplit("/", 1)[-1] for source in sources if source]
        inside = [module for module in self.modules if module.endswith(f".{path}")]
        near = list(dict.fromkeys([*inside, *difflib.get_close_matches(path, [*self.modules, *lines])]))[:3]
        hint = f"Nearest: {', '.join(near)}." if near else 'print(model) shows its modules; "" is the whole model.'
        raise UnknownPlace(f"{path!r} is no module of the model, no line of its source and no sum in its graph. {hint}")

    def _site_line(self, stream: Stream, site: Site) -> str:
        text = f"{site.source or site.node.name}: site {site.index} of stream {stream.index} ({site.kind}, {_branches(site)})"
        why = site.refused or stream.refused
        return f"{text}; not rewritable: {why}" if why else text

    def to_dict(self) -> dict[str, Any]:
        """Plain data for machines."""
        return {
            "streams": [_stream_dict(stream) for stream in self.streams],
            "loops": [loop.__dict__ for loop in self.loops],
            "rejected": [
                {"path": r.path, "source": r.source, "stage": r.stage, "reason": r.reason} for r in self.rejected
            ],
            "refused": {str(k): v for k, v in self.refused.items()},
            "forms": {str(k): v for k, v in self.forms.items()},
            "chosen": {str(k): list(v) for k, v in self.chosen.items()},
            "parameters": {name: list(shape) for name, shape in self.parameters.items()},
            "notes": list(self.notes),
        }

    def tables(self) -> list[Table]:
        """The tables that `print` shows."""
        return [_stream_table(self), *(_site_table(stream, self._left(stream)) for stream in self.streams)]

    def _left(self, stream: Stream) -> frozenset[Site]:
        """The sites that a rewrite of the stream left plain: `select=` does not match them, or they can't be rewritten."""
        chosen = self.chosen.get(stream.index)
        return frozenset() if chosen is None else frozenset(s for s in stream.sites if s.index not in chosen)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=140, record=False, color_system=None)
        if not self.streams:
            console.print("no residual connection found")
        for table in self.tables() if self.streams else []:
            console.print(table)
        for note in self.notes:
            console.print(f"note: {note}")
        if self.rejected:
            console.print(f"sums that are no residual update: {len(self.rejected)}; explain(path) tells why")
        out = console.file
        assert isinstance(out, io.StringIO)
        return out.getvalue().rstrip()


def _branches(site: Site) -> str:
    return "1 branch" if len(site.branches) == 1 else f"{len(site.branches)} branches"


def _is_at(site: Site, path: str) -> bool:
    return path in (site.path, site.node.name) or _ends(site.source, path)


def _ends(source: str, path: str) -> bool:
    return ":" in path and (source == path or source.endswith("/" + path))


def _names_file(source: str, file: str) -> bool:
    own = source.rpartition(":")[0]
    return bool(file) and (own == file or own.endswith("/" + file))


def _rejected_line(rejected: Rejected) -> str:
    where = rejected.source or rejected.node.name
    return f"{where}: no site ({rejected.stage}): {rejected.reason}"


def _stream_dict(stream: Stream) -> dict[str, Any]:
    return {
        "index": stream.index,
        "shape": [str(size) for size in stream.shape],
        "axis": stream.axis,
        "refused": stream.refused,
        "sites": [
            {
                "index": site.index, "path": site.path, "source": site.source, "kind": site.kind, "branches": len(site.branches),
                "transition": list(site.transition), "repeats": site.repeats, "rewritable": site.rewritable, "refused": site.refused,
            }
            for site in stream.sites
        ],
    }  # fmt: skip


def _stream_table(found: ResidualMap) -> Table:
    table = Table(
        title=f"{counted(len(found.streams), 'residual stream')}, {counted(len(found.sites), 'site')}",
        title_justify="left",
    )
    for name in ("stream", "shape", "sites", "branches L", "feature axis", "starts at", "state"):
        table.add_column(name, overflow="fold")
    for stream in found.streams:
        state = found.forms.get(stream.index) or found.refused.get(stream.index) or stream.refused or "plain"
        axis = "?" if stream.axis is None else str(stream.axis)
        table.add_row(
            str(stream.index),
            _shape(stream.shape),
            str(len(stream.sites)),
            str(stream.distinct_branches),
            axis,
            _where(stream.entry),
            state,
        )
    return table


def counted(number: int, name: str) -> str:
    """`1 site`, `2 sites`."""
    return f"{number:,} {name}" if number == 1 else f"{number:,} {name}s"


def _where(node: Node) -> str:
    return module_path(node) or source_of(node).rsplit("/", 1)[-1] or node.name


def _shape(shape: tuple[object, ...]) -> str:
    return escape("[" + ", ".join(str(size) for size in shape) + "]")


def _site_table(stream: Stream, left: frozenset[Site]) -> Table:
    """The sites of one stream; neighbours that differ in nothing but their place share a row."""
    table = Table(title=f"stream {stream.index}", title_justify="left")
    for name in ("site", "module", "source", "kind", "branches", "transition"):
        table.add_column(name, overflow="fold")
    for sites in _runs(stream.sites, left):
        first, last = sites[0], sites[-1]
        number = str(first.index) if first is last else f"{first.index}..{last.index} ({len(sites)})"
        path = first.path or "(root)"
        path = path if first.path == last.path else f"{path} .. {last.path or '(root)'}"
        kind = first.kind if first.rewritable else f"{first.kind}, refused: {first.refused}"
        kind = f"{kind}, left as it was" if first in left and first.rewritable else kind
        kind = kind if first.repeats == 1 else f"{kind}, run {first.repeats}x"
        table.add_row(
            number, path, first.source.rsplit("/", 1)[-1], kind, str(len(first.branches)), " ".join(first.transition)
        )
    return table


def _runs(sites: list[Site], left: frozenset[Site]) -> Iterator[list[Site]]:
    """Sites with the same source line, kind and fate, gathered when there are many."""
    if len(sites) <= 24:
        yield from ([site] for site in sites)
        return
    groups: dict[object, list[Site]] = {}
    for site in sites:
        shown = (site.source, site.kind, site.refused, len(site.branches), site.transition, site.repeats, site in left)
        groups.setdefault(shown, []).append(site)
    yield from groups.values()
