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
    "delta": (6_830_149_648, 20_964_839_454),
    "delta, 4 blocks": (6_860_693_524, 18_842_933_292),
    "attention residual": (6_561_493_018, 20_873_283_638),
    "multi gate": (7_099_478_120, 23_477_705_712),
    "review": (9_912_762_368, 31_090_577_408),
    "scaled loop": (6_085_959_680, 14_983_763_968),
    "standard": (6_085_959_680, 14_916_655_104),
}


# No kernel of these takes more tensors: with more, compile times explode at depth.
MOST_ARGUMENTS = 24
BOUNDED = ("delta", "delta, 4 blocks", "attention residual")


def counted(name: str) -> tuple[int, int, int]:
    command = [sys.executable, ROOT / "benchmarks" / "lowering.py", name, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    line = next(json.loads(line) for line in run.stdout.splitlines() if line.startswith("{"))
    parts = line["inference"], line["training"]
    inference, training = (round(1e9 * part["total_gb"]) for part in parts)
    return inference, training, max(part["arguments"] for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_moved(name: str) -> None:
    *actual, arguments = counted(name)
    print(name, actual, arguments)
    if PINNED:
        assert tuple(actual) == EXPECTED[name]
        assert name not in BOUNDED or arguments <= MOST_ARGUMENTS
