"""What each form costs in ONNX Runtime on the CPU: `python benchmarks/onnx_runtime.py [NAME ..] [--sublayers N] [--out FILE]`.

The reference net (`reference_net.py`), D 256, 4 x 256 tokens, float32: nodes, size of the file, and time of a run over the plain net's.
All nets take turns, round by round, in one process; the time is the median round's. One line each, as JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from reference_net import ReferenceNet, forms
from reporting import put_section, seconds, table
from torch import nn

import resfx
from resfx.passes.form import Form

WIDTH, BATCH, TOKENS = 256, 4, 256
HEADER = ["net", "nodes", "file over plain", "time over plain"]


def exported(form: Form | None, sublayers: int, folder: Path) -> tuple[Path, int]:
    """The net as a file, and how many nodes it has there."""
    torch.manual_seed(0)
    net: nn.Module = ReferenceNet(sublayers, WIDTH)
    x = torch.randn(2, 8, WIDTH)
    if form is not None:
        net = resfx.rewrite(net, form, (x,))
    path = folder / f"{form.name if form else 'plain'}-{len(list(folder.iterdir()))}.onnx"
    resfx.export.to_onnx(net, path, (x,), check=False)
    return path, len(onnx.load(str(path)).graph.node)


def runner(path: Path, threads: int) -> Callable[[], Any]:
    """Runs the file on the example."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: torch.randn(BATCH, TOKENS, WIDTH).numpy()}
    return lambda: session.run(None, feed)


def put(path: Path, rows: list[list[str]], sublayers: int, threads: int) -> None:
    """The table with what it is of, as a section of the file."""
    text = f"""The reference net, {sublayers} pre-norm sublayers, D {WIDTH}, {BATCH} x {TOKENS} tokens, float32, {threads} threads:
nodes of the main graph, and the size of the file and the time of a run over the plain net's.

{table(HEADER, rows)}"""
    put_section(path, "In ONNX Runtime", f"python benchmarks/onnx_runtime.py --sublayers {sublayers}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="lines; all of them if none is given. plain always runs"
    )
    parser.add_argument("--sublayers", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="the file whose section is written; none if it isn't given")
    options = parser.parse_args()
    known: dict[str, Form | None] = {"plain": None, **forms(options.sublayers)}
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"no line named {', '.join(unknown)}; there are {', '.join(known)}")
    names = ["plain", *(name for name in options.names or known if name != "plain")]
    with tempfile.TemporaryDirectory() as folder:
        files = {name: exported(known[name], options.sublayers, Path(folder)) for name in names}
        times = seconds({name: runner(path, options.threads) for name, (path, _) in files.items()}, options.rounds)
        plain = files["plain"][0].stat().st_size
        rows = []
        for name, (path, nodes) in files.items():
            found = {
                "nodes": nodes,
                "file over plain": path.stat().st_size / plain,
                "time over plain": times[name] / times["plain"],
            }
            print(json.dumps({"name": name, **found, "ms": 1000 * times[name]}), flush=True)
            rows.append([name, str(nodes), *(f"{found[key]:.3f}" for key in HEADER[2:])])
    if options.out is not None:
        put(options.out, rows, options.sublayers, options.threads)


if __name__ == "__main__":
    main()
