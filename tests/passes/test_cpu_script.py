"""`benchmarks/cpu.py` at a size that compiles in seconds: every mode runs, and each line has its ratio and kernels."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu.py"
SMALL = ["--sublayers", "4", "--width", "8", "--batch", "2", "--tokens", "4", "--threads", "1", "--rounds", "1"]


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, check=False)


def test_unknown_names_are_refused() -> None:
    result = run("nothing", *SMALL)
    assert result.returncode == 2
    assert "no line named nothing; there are plain, published delta" in result.stderr


@pytest.mark.slow
def test_every_mode(tmp_path: Path) -> None:
    result = run("published delta", "delta", *SMALL, "--out", str(tmp_path / "out.md"))
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() in (tmp_path / "out.md").read_text()
    rows = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in result.stdout.splitlines()[2:])}
    assert list(rows) == ["plain", "published delta", "delta"]
    cells = [re.fullmatch(r"(\d+\.\d\d) \((\d+) kernels, \d+ s\)", cell) for row in rows.values() for cell in row]
    assert len(cells) == 9
    assert all(cell and float(cell[1]) > 0 and int(cell[2]) > 0 for cell in cells)
    assert [cell[1] for cell in cells[:3] if cell] == ["1.00"] * 3
