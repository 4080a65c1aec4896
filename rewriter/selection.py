"""Which streams and sites a rewrite takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from resfx.patterns import NoResidualFound, ResfxError, Site, Stream

Select: TypeAlias = "str | Sequence[str] | Callable[[Site], bool] | None"
Streams: TypeAlias = "int | Sequence[int] | None"


class SelectionError(ResfxError):
    """`streams=` or `select=` names something that is not there."""


def chosen_streams(found: Sequence[Stream], streams: Streams, taken: Sequence[int]) -> list[int]:
    """The indices to rewrite: those asked for, or all that no earlier rewrite has taken. Errors: SelectionError."""
    if streams is None:
        free = [s.index for s in found if s.index not in taken]
        if not free:
            raise SelectionError(
                "every stream of this model is rewritten already; resfx.revert gives the plain model back"
            )
        return free
    wanted = [streams] if isinstance(streams, int) else list(streams) if isinstance(streams, Iterable) else []
    if not wanted or not all(isinstance(index, int) for index in wanted):
        raise SelectionError(f"streams={streams!r} names no stream; give indices of find's map, or None for all")
    for index in wanted:
        if index in taken:
            raise SelectionError(f"stream {index} is rewritten already; resfx.revert gives the plain model back")
        if index not in range(len(found)):
            raise SelectionError(f"there is no stream {index}; the model has {_known(len(found))}")
    return wanted


def _known(streams: int) -> str:
    return "stream 0 alone" if streams == 1 else f"{streams} streams, 0 to {streams - 1}"


def predicate(select: Select) -> Callable[[Site], bool] | None:
    """`select=` as a predicate over sites: globs on module paths, or the user's own function; None selects all."""
    if select is None or callable(select):
        return select
    globs = [select] if isinstance(select, str) else list(select) if isinstance(select, Iterable) else [select]
    if not all(isinstance(glob, str) for glob in globs):
        raise SelectionError(
            f"select={select!r}: give a glob on module paths, several of them, or a function over sites"
        )
    return lambda site: any(fnmatchcase(site.path, glob) for glob in globs)


def matching(found: Sequence[Stream], wanted: Sequence[int], select: Select, *, explicit: bool) -> list[int]:
    """Those of `wanted` that have a site which `select=` matches; all of them where they were asked for one by one.

    Errors: NoResidualFound where no site of `wanted` matches; SelectionError where all that match are rewritten.
    """
    matches = predicate(select)
    if matches is None:
        return list(wanted)
    hit = [stream.index for stream in found if any(matches(site) for site in stream.sites)]
    chosen = [index for index in wanted if index in hit]
    if chosen:
        return list(wanted) if explicit else chosen
    if hit and not explicit:
        raise SelectionError(
            f"select={select!r} matches sites of stream {hit[0]} alone, which is rewritten already; "
            "resfx.revert gives the plain model back"
        )
    paths = sorted({site.path or "(root)" for index in wanted for site in found[index].sites})
    raise NoResidualFound(f"select={select!r} matches no site; sites are in: {', '.join(paths[:20])}", [])
