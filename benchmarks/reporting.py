"""What the benchmark scripts share: times of runs that take turns, and the sections of `RESULTS.md` that each script writes for itself."""

from __future__ import annotations

import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

PREFACE = "# Results\n\nEach section is written by the command that it names; none is edited by hand.\n"


def seconds(
    runs: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The median time of each, taking turns; the first round is left out."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            started = clock()
            run()
            times[name].append(clock() - started)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def put_section(path: Path, title: str, command: str, text: str) -> None:
    """Write the section `title` of the file anew; the other sections stay as they are, a new one goes to the end."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    section = f"## {title}\n\n`{command}`, {datetime.now(UTC):%Y-%m-%d}: {versions}.\n\n{text}\n"
    found = path.read_text(encoding="utf-8") if path.exists() else PREFACE
    preface, *sections = re.split(r"^(?=## )", found, flags=re.MULTILINE)
    known = {part.splitlines()[0]: part.strip() + "\n" for part in sections}
    known[f"## {title}"] = section
    path.write_text("\n".join([preface.strip() + "\n", *known.values()]), encoding="utf-8")
