"""Curves by depth into a picture file. matplotlib is an optional extra and is imported when it is needed."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from resfx.export.paths import checked_path, staged
from resfx.patterns import ResfxError

Curves = Mapping[str, Mapping[str, Sequence[float | None]]]
_COLUMNS = 2


class PlotError(ResfxError):
    """A report could not be drawn."""


def draw(curves: Curves, path: str | os.PathLike[str]) -> None:
    """One panel a quantity, one line a stream, over the executions in order. Errors: PlotError, OutputPathError."""
    if not curves:
        raise PlotError("there is nothing to draw: the report has no numbers")
    target = checked_path(path)
    figure = _figure(len(curves))
    for number, (heading, lines) in enumerate(curves.items()):
        axes = figure.add_subplot(math.ceil(len(curves) / _COLUMNS), _COLUMNS, number + 1)
        for label, values in lines.items():
            known = [(place, value) for place, value in enumerate(values) if value is not None]
            axes.plot(*zip(*known, strict=True), marker=".", label=label)
        axes.set_title(heading)
        axes.set_xlabel("site, in the order of execution")
        axes.legend(fontsize="small")
    with staged(target) as file:
        try:
            figure.savefig(file)
        except ValueError as e:
            raise PlotError(f"{target.name} can't be drawn: {e}; end the name in .png, .svg or .pdf") from e


def _figure(panels: int) -> Any:
    try:
        from matplotlib.figure import Figure  # no pyplot: it would open windows and keep global state
    except ImportError as e:
        raise PlotError('report.plot needs matplotlib: pip install "resfx[plot]"') from e
    return Figure(figsize=(12, 3.5 * math.ceil(panels / _COLUMNS)), layout="constrained")
