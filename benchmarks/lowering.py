"""What each form costs on a GPU: `python benchmarks/lowering.py [NAME ..] [--sublayers N] [--json] [--out FILE]`.

Bytes, launches, arguments and compile seconds of the reference net (`reference_net.py`) under torch.compile, as `gpu_static.py` reads them
without a GPU: plain, written as the papers publish it, and every form as resfx emits it. Some minutes for the whole table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from gpu_static import measure
from reference_net import SUBLAYERS, WIDTH, Published, ReferenceNet, example, forms, rewritten, with_memory
from reporting import put_section, table
from rich.console import Console
from torch import nn

HEADER = ["net", "forward GB", "forward + backward GB", "saved GB", "launches", "most arguments", "compile s"]


def nets(sublayers: int, width: int = WIDTH) -> dict[str, Callable[[], nn.Module]]:
    """Every line of the table by its name: what builds its net, outside of any mode, in bfloat16."""
    block = max(sublayers // 4, 1)
    return {
        "plain": partial(_empty, ReferenceNet, sublayers, width),
        "published delta": partial(_empty, Published, sublayers, width),
        "published delta, 4 blocks": partial(_empty, Published, sublayers, width, block_size=block),
        **{name: partial(rewritten, form, sublayers, width) for name, form in forms(sublayers).items()},
    }


def _empty(kind: type[nn.Module], *args: Any, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return kind(*args, **options).bfloat16()


def on_a_gpu(x: torch.Tensor) -> bool:
    """The net is traced on the CPU and compiled for a GPU."""
    return True


def cost(build: Callable[[], nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    """`measure`'s figures of inference and of training."""
    figures = []
    for train in (False, True):
        net = build()
        with (
            mock.patch("resfx.passes.products.widens_products", on_a_gpu),
            mock.patch("resfx.passes.group_kernels.runs_on", on_a_gpu),
        ):
            figures.append(measure(lambda net=net: (with_memory(net), (example(),), {}), train=train))
    return figures[0], figures[1]


def row(name: str, inference: dict[str, Any], training: dict[str, Any]) -> list[str]:
    """A line of the table; two numbers are inference / training."""
    return [
        name,
        f"{inference['total_gb']:.1f}",
        f"{training['total_gb']:.1f}",
        f"{training['fwd']['saved_gb']:.2f}",
        f"{inference['launches']} / {training['launches']}",
        f"{inference['arguments']} / {training['arguments']}",
        f"{inference['seconds']:.0f} / {training['seconds']:.0f}",
    ]


def put(path: Path, rows: list[list[str]], sublayers: int) -> None:
    """The table with what it is of, as a section of the file."""
    text = f"""The reference net, {sublayers} pre-norm sublayers, D 1024, 8 x 2048 tokens, bfloat16, compiled by Inductor for a
pretended H200: no kernel has run. GB are decimal; "saved" is what the forward keeps for the backward beyond inputs and parameters. Where
there are two numbers, they are inference / training. Seconds are processor time.

{table(HEADER, rows)}"""
    command = f"python benchmarks/lowering.py --sublayers {sublayers}"
    put_section(path, f"On a GPU, {sublayers} sublayers", command, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="lines of the table; all of them if none is given")
    parser.add_argument("--sublayers", type=int, default=SUBLAYERS)
    parser.add_argument(
        "--json", action="store_true", help="one line of JSON for each line of the table, with all that was counted"
    )
    parser.add_argument("--out", type=Path, help="the file whose section is written; none if it isn't given")
    options = parser.parse_args()
    known = nets(options.sublayers)
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"no line named {', '.join(unknown)}; there are {', '.join(known)}")
    console, rows = Console(soft_wrap=True), []
    for name in options.names or known:
        inference, training = cost(known[name])
        rows.append(row(name, inference, training))
        line = json.dumps({"name": name, "inference": inference, "training": training})
        console.print(line if options.json else "  ".join(rows[-1]), markup=False, highlight=False)
    if options.out is not None:
        put(options.out, rows, options.sublayers)


if __name__ == "__main__":
    main()
