"""`benchmarks/reporting.py`: a script writes its own section of a file and leaves the others alone."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from reporting import PREFACE, put_section, seconds, table


def test_a_section_is_written_anew_in_its_place(tmp_path: Path) -> None:
    path = tmp_path / "results.md"
    put_section(path, "One", "python one.py", table(["net", "GB"], [["plain", "1.0"]]))
    put_section(path, "Two", "python two.py", "second")
    put_section(path, "One", "python one.py", "first, again")
    text = path.read_text()
    assert text.startswith(PREFACE)
    assert [line for line in text.splitlines() if line.startswith("#")] == ["# Results", "## One", "## Two"]
    assert "plain" not in text
    assert text.index("first, again") < text.index("## Two") < text.index("second")
    put_section(path, "Two", "python two.py", "second")
    assert path.read_text() == text


def test_runs_take_turns_and_the_first_round_is_left_out() -> None:
    order: list[str] = []
    ticks = iter([0.0, 100.0, 0.0, 100.0, 0.0, 1.0, 0.0, 2.0, 0.0, 3.0, 0.0, 4.0])
    found = seconds({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2, lambda: next(ticks))
    assert order == ["a", "b"] * 3
    assert found == {"a": 2.0, "b": 3.0}
