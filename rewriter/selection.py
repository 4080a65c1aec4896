"""Which streams and sites a rewrite takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
            raise SelectionError("every stream of this model is rewritten already; resfx.revert gives the plain model back")
        return free
    wanted = [streams] if isinstance(streams, int) else list(streams)
    for index in wanted:
        if index in taken:
            raise SelectionError(f"stream {index} is rewritten already; resfx.revert gives the plain model back")
        if index not in range(len(found)):
            raise SelectionError(f"there is no stream {index}; the model has {len(found)}: 0 to {len(found) - 1}")
    return wanted


def predicate(select: Select) -> Callable[[Site], bool] | None:
    """`select=` as a predicate over sites: globs on module paths, or the user's own function; None selects all."""
    if select is None or callable(select):
        return select
    globs = [select] if isinstance(select, str) else list(select)
    return lambda site: any(fnmatchcase(site.path, glob) for glob in globs)


def require_match(streams: Sequence[Stream], select: Select) -> None:
    """Errors: NoResidualFound where `select=` matches no site of `streams`."""
    matches = predicate(select)
    if matches is None or any(matches(site) for stream in streams for site in stream.sites):
        return
    paths = sorted({site.path or "(root)" for stream in streams for site in stream.sites})
    raise NoResidualFound(f"select={select!r} matches no site; sites are in: {', '.join(paths[:20])}", [])
