"""Takes the models of the zoo through their steps, each in a process of its own with a time and a memory limit.

    python tests/zoo/zoo_sweep.py results.jsonl --groups find delta --timeout 300

One JSON line per model and group of steps; what is in the file already is not done again (what ran out of time is, once the limit
is higher). A model that hangs, eats the memory or crashes costs its own line only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import re
import resource
import signal
import subprocess
import time
import warnings
import zlib
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from zoo_builders import ZOO
from zoo_steps import COVERAGE, GROUPS, Subject

import resfx

# Imported before the processes part, so that none of them imports it again.
for library in ("timm", "torchvision", "transformers.modeling_utils", "torch.export", "onnx", "onnxruntime"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        __import__(library)

MEMORY = 14 << 30
# A hanging model sleeps, a slow one computes: the limit is on the processor's time, and many times as much may pass on a busy machine.
PATIENCE = 20
_INSTALLED = re.compile(r"[^\s\"'`(]*/site-packages/")  # where this machine keeps libraries is nobody's business
_FORK = multiprocessing.get_context("fork")


def warm_up() -> None:
    """What torch imports at its first export is imported once, before the processes part."""
    with contextlib.redirect_stdout(io.StringIO()):
        torch.set_num_threads(1)
        resfx.rewrite(torch.nn.Sequential(_Block()), resfx.DeltaAttention(), (torch.randn(2, 3, 4),), warm_start=True)


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.first(x)
        return x + self.second(x)


def shard(name: str, part: int, parts: int) -> bool:
    """A model stays in its part whatever else joins the zoo."""
    return zlib.crc32(name.encode()) % parts == part


def take_through(name: str, groups: Sequence[str], timeout: float) -> dict[str, dict[str, Any]]:
    """group -> {"seconds", "steps"} for one model. `timeout`: seconds of processor time. A limit that was hit is the group's last step."""
    receiver, sender = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_work, args=(name, groups, timeout, sender))
    process.start()
    sender.close()
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + PATIENCE * timeout
    try:
        while receiver.poll(max(0.0, deadline - time.monotonic())):
            group, step, result, seconds = receiver.recv()
            entry = found.setdefault(group, {"seconds": 0.0, "steps": {}, "done": False})
            entry["seconds"] = round(seconds, 1)
            if step is None:
                entry["done"] = True
            else:
                entry["steps"][step] = result
        reason = {"status": "fail", "class": "timeout", "reason": f"hangs for {PATIENCE * timeout:.0f} s"}
    except EOFError:
        process.join()
        late = process.exitcode == -signal.SIGXCPU
        text = f"not done in {timeout:.0f} s" if late else f"the process ended with code {process.exitcode}"
        reason = {"status": "fail", "class": "timeout" if late else "crash", "reason": text}
    finally:
        process.kill()
        process.join()
    unfinished = next((group for group in groups if not found.get(group, {}).get("done")), None)
    if unfinished is not None:
        entry = found.setdefault(unfinished, {"seconds": timeout, "steps": {}, "done": False})
        entry["steps"]["limit"] = reason
    return found


def _work(name: str, groups: Sequence[str], timeout: float, sender: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(timeout), int(timeout) + 10))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    subject = Subject(name)
    for group in groups:
        start = time.process_time()

        def report(step: str, result: dict[str, Any], group: str = group, start: float = start) -> None:
            sender.send((group, step, result, time.process_time() - start))

        with contextlib.redirect_stdout(io.StringIO()):
            GROUPS[group](subject, report)
        sender.send((group, None, None, time.process_time() - start))


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(model, group) -> its newest line."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["model"], line["group"]): line for line in lines}


def head() -> str:
    """The commit that is swept, marked where the working tree differs from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def is_open(line: dict[str, Any] | None, timeout: float) -> bool:
    """Is there work left? What ran out of time is tried again with more of it."""
    if line is None:
        return True
    limit = line["steps"].get("limit", {})
    return limit.get("class") == "timeout" and bool(line["timeout"] < timeout)


def sweep(
    path: Path, names: Sequence[str], groups: Sequence[str], timeout: float, say: Callable[[str], None] = print
) -> None:
    done, commit = read(path), head()
    for name in names:
        missing = [group for group in groups if is_open(done.get((name, group)), timeout)]
        if not missing:
            continue
        for group, entry in take_through(name, missing, timeout * len(missing)).items():
            line = {"model": name, "group": group, "timeout": timeout, "commit": commit, **entry}
            with path.open("a") as file:
                file.write(_INSTALLED.sub("", json.dumps(line)) + "\n")
            wrong = {step: result for step, result in entry["steps"].items() if result["status"] in ("fail", "refuse")}
            texts = [f"{step}: {result['status']}: {result['reason'][:200]!r}" for step, result in wrong.items()]
            say(f"{name} {group} {entry['seconds']:.0f} s {'; '.join(texts) or 'ok'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(COVERAGE))
    parser.add_argument("--models", nargs="+", default=list(ZOO))
    parser.add_argument("--shard", default="0/1", help="K/N: the K-th (from 0) of N parts of the models")
    parser.add_argument(
        "--timeout", type=float, default=300.0, help="seconds of processor time for each model and group"
    )
    options = parser.parse_args()
    part, parts = map(int, options.shard.split("/"))
    warm_up()
    names = [name for name in options.models if shard(name, part, parts)]
    sweep(options.results, names, options.groups, options.timeout)


if __name__ == "__main__":
    main()
