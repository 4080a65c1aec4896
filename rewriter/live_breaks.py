"""Where and why Dynamo broke a graph off, in one line: for messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def break_line(reason: Any) -> str | None:
    """Where and why Dynamo broke a graph off, in one line; None where it came to its end."""
    if reason is None or not getattr(reason, "graph_break", False):
        return None
    frames = getattr(reason, "user_stack", None) or []
    where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown line"
    what = str(getattr(reason, "reason", "")).strip().splitlines()
    return f"{where} ({what[0]})" if what else where


def breaks_so_far() -> int:
    """How many graph breaks Dynamo has met up to now; for `last_break`."""
    return len(_reasons())


def last_break(since: int) -> str | None:
    """The last graph break of those after the first `since`: of frames without a graph too, as a loop that is broken has none."""
    met = _reasons()
    return break_line(met[-1]) if len(met) > since else None


def _reasons() -> Sequence[Any]:
    """Private: Dynamo's own list. A backend is told of a break only where there was a graph before it."""
    from torch._dynamo import utils

    found: Sequence[Any] = getattr(utils, "graph_break_reasons", ())
    return found
