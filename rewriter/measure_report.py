"""What `measure` found, as data, as tables and as a picture."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from resfx.report_plot import draw

# The columns of numbers, with their headings.
QUANTITIES = {
    "stream_norm": "stream norm",
    "update_norm": "update norm",
    "cosine": "cosine",
    "weight_max": "max weight",
    "weight_entropy": "entropy",
    "gate_mean": "gate",
    "gradient_norm": "gradient",
}


@dataclass(frozen=True)
class SiteReading:
    """One execution of one site; None where there is no such number.

    `site`: its number in its stream; "final" and "tap<k>" are the reads that leave the stream, which have weights only.
    `loop`: which repeat of a repeated body (`ScaledLoop(loops=K)`), from 0, outermost first; empty outside of one.
    `stream_norm`, `update_norm`: root mean square, over all tokens, of the norm of the state before the update (for a form that
    keeps no state: of what the branch reads) and of the update.
    `cosine`: between this update and the one before it in the stream, as whole tensors; None where their shapes differ.
    `weight_max`, `weight_entropy`: of the routing weights over the `sources`, mean over tokens; the entropy in nats, at most
    log(sources).
    `gate_mean`: over tokens, channels and streams. `gradient_norm`: of the loss in the update, as one tensor.
    """

    stream: int
    site: int | str
    loop: tuple[int, ...]
    path: str
    source: str
    stream_norm: float | None = None
    update_norm: float | None = None
    cosine: float | None = None
    weight_max: float | None = None
    weight_entropy: float | None = None
    sources: int | None = None
    gate_mean: float | None = None
    gradient_norm: float | None = None


@dataclass(frozen=True)
class Report:
    """The readings of one call, stream by stream, each in the order of execution.

    `forms`: the form of every stream that was measured. `unmeasured`: why the others were not. `loss`: its value, None without one.
    """

    sites: tuple[SiteReading, ...]
    forms: dict[int, str]
    unmeasured: dict[int, str]
    loss: float | None = None

    def __post_init__(self) -> None:
        known = {f.name for f in fields(SiteReading)}
        assert known >= set(QUANTITIES)

    def of_stream(self, stream: int) -> tuple[SiteReading, ...]:
        """The readings of one stream, in the order of execution."""
        return tuple(reading for reading in self.sites if reading.stream == stream)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for machines."""
        return {
            "sites": [{**asdict(reading), "loop": list(reading.loop)} for reading in self.sites],
            "forms": {str(stream): form for stream, form in self.forms.items()},
            "unmeasured": {str(stream): reason for stream, reason in self.unmeasured.items()},
            "loss": self.loss,
        }

    def tables(self) -> list[Table]:
        """One table a stream, as `print` shows them."""
        return [_table(stream, form, self.of_stream(stream)) for stream, form in self.forms.items()]

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw every quantity by depth into a file (png, svg, pdf, .. by its ending).

        Errors: PlotError where matplotlib is missing (`pip install "resfx[plot]"`) or can't write such a file, OutputPathError.
        """
        curves: dict[str, dict[str, list[float | None]]] = {}
        for name, heading in QUANTITIES.items():
            per_stream = {f"stream {s} ({form})": _values(self.of_stream(s), name) for s, form in self.forms.items()}
            known = {label: values for label, values in per_stream.items() if any(v is not None for v in values)}
            if known:
                curves[heading] = known
        draw(curves, path)

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=140, color_system=None)
        for table in self.tables():
            console.print(table)
        for stream, reason in self.unmeasured.items():
            console.print(f"stream {stream} was not measured: {reason}", markup=False)
        if self.loss is not None:
            console.print(f"loss: {self.loss:.6g}")
        out = console.file
        assert isinstance(out, io.StringIO)
        return out.getvalue().rstrip()


def _values(readings: Sequence[SiteReading], name: str) -> list[float | None]:
    return [getattr(reading, name) for reading in readings]


def _table(stream: int, form: str, readings: Sequence[SiteReading]) -> Table:
    """Columns without a number are left out."""
    table = Table(title=f"stream {stream}: {form}", title_justify="left")
    table.add_column("site")
    table.add_column("module", overflow="fold")
    shown = {
        name: heading for name, heading in QUANTITIES.items() if any(v is not None for v in _values(readings, name))
    }
    for heading in shown.values():
        table.add_column(heading, justify="right")
    for reading in readings:
        loop = "".join(f"@{number}" for number in reading.loop)
        numbers = [_number(getattr(reading, name)) for name in shown]
        table.add_row(f"{reading.site}{loop}", reading.path or ("(root)" if reading.source else ""), *numbers)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
