"""The memory traffic of the reference net under Inductor, to the byte: a form that starts to cost more is a red test.

`benchmarks/lowering.py` counts it without a GPU, in a process of its own. The counts belong to the torch that constraints.txt pins.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PINNED = f"torch=={torch.__version__.split('+')[0]}" in (ROOT / "constraints.txt").read_text().split()
pytest.importorskip("triton", reason="Inductor writes GPU code with it")

# Bytes of inference and of training, by the names of benchmarks/lowering.py.
EXPECTED = {
    "plain": (6_085_959_680, 14_916_655_104),
    "delta": (8_149_950_464, 24_656_791_552),
    "multi gate": (7_506_317_384, 23_477_705_712),
    "review": (9_912_762_368, 31_090_577_408),
    "scaled loop": (6_085_959_680, 15_654_852_608),
    "standard": (6_085_959_680, 14_916_655_104),
}


def counted(name: str) -> tuple[int, int]:
    command = [sys.executable, ROOT / "benchmarks" / "lowering.py", name, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    line = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    return round(1e9 * line["inference"]["total_gb"]), round(1e9 * line["training"]["total_gb"])


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_moved(name: str) -> None:
    actual = counted(name)
    print(name, actual)
    if PINNED:
        assert actual == EXPECTED[name]
