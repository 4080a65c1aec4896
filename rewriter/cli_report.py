"""What the command line shows: answers on stdout, progress and errors on stderr."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch.fx import GraphModule

from resfx.patterns.report import ResidualMap, counted
from resfx.rewritten import Rewritten

WIDTH = 140  # of tables that go into a file or a pipe
SLOW_STEP = 2.0  # seconds from which a finished step leaves a line

_FREED = re.compile(r";  (\w+ = )+None$")  # fx frees values as it goes
_INSIDE_TORCH = re.compile(r" *# .*File: [^ ]*/site-packages/torch/")  # where a module calls into torch says nothing
_GETATTR = re.compile(r'getattr\(([\w.]+), "(\w+)"\)')
_SOURCE = re.compile(r"^( *)# .*?File: (?:[^ ]*/)?([^ /]+:\d+) in \w+, code: (.*)$")


@dataclass(frozen=True)
class Answer:
    """A command's result, once for machines and once for people."""

    data: dict[str, Any]
    text: list[RenderableType]


def show(answer: Answer, as_json: bool) -> None:
    """Print the answer on stdout: one JSON object, or the text."""
    if as_json:
        sys.stdout.write(json.dumps(answer.data, indent=2, default=_plain) + "\n")
        return
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=WIDTH)
    for part in answer.text:
        console.print(part, soft_wrap=isinstance(part, Text))


def show_error(error: BaseException, as_json: bool, hint: str = "") -> None:
    """A short panel on stderr; with `as_json` also one JSON object on stdout."""
    message = str(error).strip() or type(error).__name__
    if as_json:
        sys.stdout.write(json.dumps({"error": {"type": type(error).__name__, "message": message}}) + "\n")
    body = Text(message)
    cause = error.__cause__
    if cause is not None and str(cause).strip() and str(cause).strip()[:80] not in message:
        body.append(f"\n\ncause: {type(cause).__name__}: {str(cause).strip()[:500]}", style="dim")
    if hint:
        body.append(f"\n\n{hint}", style="dim")
    Console(stderr=True).print(Panel(body, title=type(error).__name__, title_align="left", border_style="red"))


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """A spinner while the step runs (on a terminal), and its time once it is over where it was slow."""
    console = Console(file=sys.stderr)  # this one: a failing export's prints are held back from sys.stderr
    start = time.monotonic()
    with console.status(title):
        yield
    seconds = time.monotonic() - start
    if seconds >= SLOW_STEP:
        console.print(Text(f"{title}: {seconds:.1f} s", style="dim"))


def facts(title: str, rows: dict[str, str]) -> Table:
    """A two-column table."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def map_parts(found: ResidualMap) -> list[RenderableType]:
    """A ResidualMap at the width of the terminal; `str(found)` has a width of its own."""
    parts: list[RenderableType] = [*found.tables(), *(Text(f"note: {note}") for note in found.notes)]
    if found.rejected:
        sums, verb = counted(len(found.rejected), "sum"), "is" if len(found.rejected) == 1 else "are"
        parts.append(Text(f"{sums} {verb} no residual update; resfx find --explain PATH tells why"))
    return parts


def rewritten_table(data: dict[str, Any]) -> Table:
    """The summary of a rewrite, for people."""
    rows = {
        "form": data["form"],
        "rewritten": "\n".join(f"stream {stream}: {counted(count, 'site')}" for stream, count in data["sites"].items()),
        "left plain": "\n".join(f"stream {stream}: {reason}" for stream, reason in data["refused"].items()),
        "new parameters": f"{data['parameters_added']:,} in {counted(len(data['parameters']), 'tensor')}, under residual.*",
        "notes": "\n".join(data["notes"]),
        "saved": data["output"] or "",
    }
    return facts("rewritten", {name: value for name, value in rows.items() if value})


def graph_text(model: GraphModule | Rewritten) -> str:
    """The graph of a rewritten model: a line for each node; those of one line of the user's stand under it.

    Module and parameter paths read as in the `state_dict`: `self.blocks.0.norm`.
    """
    text = str(model.print_readable(print_output=False))
    lines: list[str] = []
    source = ""
    for line in text.splitlines():
        if _INSIDE_TORCH.match(line):
            continue
        line = _dotted(_SOURCE.sub(r"\1# \2: \3", _FREED.sub("", line)))
        if line.lstrip().startswith("#"):
            source, before = line, source
            if source == before:
                while not lines[-1].strip():
                    lines.pop()
                continue
        lines.append(line.rstrip())
    return re.sub(r"\n\n+", "\n\n", "\n".join(lines))


def _dotted(line: str) -> str:
    while (shorter := _GETATTR.sub(r"\1.\2", line)) != line:
        line = shorter
    return line


def diff(before: str, after: str) -> Text:
    """Unified diff of two graph texts, coloured on a terminal."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    text = Text()
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=2):
        text.append(line + "\n", style=styles.get(line[:1], ""))
    return text


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    return str(value)
