"""How exact the forms are: `python benchmarks/exactness.py [--out benchmarks/EXACTNESS.md]`, some minutes on one core.

A row is a form, a column a kind of model, a cell the worst relative error of the outputs and of the gradients (all parameters,
old and new, and the inputs) between `resfx.rewrite` and an eager reference that was written apart from it
(`tests/passes/passes_reference.py`), in float64. `tests/passes/test_exactness.py` demands 1e-9 of every cell.
"""

from __future__ import annotations

import argparse
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "passes"))

from passes_exactness import FORMS, KINDS, worst_errors  # noqa: E402 -- found by the line above


def rows(console: Console) -> list[list[str]]:
    """Every form with its cells, then the worst of each column."""
    found = []
    worst = dict.fromkeys(KINDS, (0.0, 0.0))
    for form in FORMS:
        cells = []
        for kind in KINDS:
            errors = worst_errors(kind, form)
            worst[kind] = (max(worst[kind][0], errors.output), max(worst[kind][1], errors.gradient))
            cells.append(_cell(*errors))
        console.print(form.to_spec(), *cells, sep="  ", markup=False)
        found.append([form.to_spec(), *cells])
    return [*found, ["worst", *(_cell(*worst[kind]) for kind in KINDS)]]


def _cell(output: float, gradient: float) -> str:
    return f"{output:.0e} / {gradient:.0e}"


def markdown(header: list[str], body: list[list[str]]) -> str:
    """The table with the command and the versions that made it."""
    lines = [header, ["---"] * len(header), *body]
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"""# Exactness

Written by `python benchmarks/exactness.py` on {datetime.now(UTC):%Y-%m-%d}: {versions}.

Worst relative error of the outputs / of the gradients in all parameters, old and new, and in the inputs: `resfx.rewrite` against an
eager reference (`tests/passes/passes_reference.py`) in float64, every new parameter moved away from its start. Post-norm is
`LayerNorm(h + u)`; conv mixes `relu(h + u)` and `h + u` in NCHW; the tied loop runs two branches three times; in the encoder-decoder
both streams are rewritten, and the decoder reads the encoder's end.

{table}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_name("EXACTNESS.md"), help="where the table goes"
    )
    options = parser.parse_args()
    console = Console()
    header, body = ["form", *KINDS], rows(console)
    table = Table(*header, title="worst relative error: outputs / gradients")
    for line in body:
        table.add_row(*line)
    console.print(table)
    options.out.write_text(markdown(header, body), encoding="utf-8")


if __name__ == "__main__":
    main()
