"""`benchmarks/gpu.py` where there is no GPU: it says so, and its dry mode runs every line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so() -> None:
    result = run()
    assert result.returncode == 2
    assert "torch sees no GPU here" in result.stderr


@pytest.mark.slow
def test_dry(tmp_path: Path) -> None:
    """Every net is compared and timed; float32 is right to 1e-5."""
    result = run("--dry", "--minutes", "60", "--out", str(tmp_path / "out.md"))
    assert result.returncode == 0, result.stderr
    lines = [line for line in (tmp_path / "out.md").read_text().splitlines() if line.startswith("| ")]
    numbers = [line.split(" | ") for line in lines if line.count("|") == 6 and "e-" in line]
    times = [line.split(" | ") for line in lines if line.count("|") == 11 and line.startswith("| 16")]
    assert {row[0].strip("| ") for row in numbers} <= {row[2] for row in times}
    assert len(numbers) >= 10
    assert all(float(row[1]) < 1e-5 and float(row[2]) < 1e-4 for row in numbers)
    assert "not run" not in "".join(lines)
