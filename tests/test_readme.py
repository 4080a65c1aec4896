"""The README is run: its Python blocks, its commands, and the graphs it shows."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import resfx
from resfx.cli import app
from resfx.cli_report import graph_text
from resfx.demo import example

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -c constraints.txt"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def shell_lines() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line and not line.startswith("#")]


COMMANDS = [line for line in shell_lines() if line.startswith("resfx ") and not line.startswith("resfx demo")]


def test_python_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In order, in one namespace, as one pastes them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    assert len(blocks("python")) >= 3
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README.md, Python block {number}", "exec"), namespace)
    assert (tmp_path / "model.onnx").stat().st_size > 0
    printed = capsys.readouterr().out
    assert "blocks.0" in printed
    assert "site 1 of stream 0" in printed


def test_the_graphs_before_and_after() -> None:
    """What `resfx rewrite --graph` prints, in this order, types left out."""
    forms = (resfx.Standard(), resfx.DeltaAttention())
    assert len(blocks("graph")) == len(forms)
    for form, block in zip(forms, blocks("graph"), strict=True):
        model, args = example()
        text = re.sub(r': "[^"]*"', "", graph_text(resfx.rewrite(model, form, args)))
        printed = iter([line.strip() for line in text.splitlines()])
        assert [line for line in block.splitlines() if line not in printed] == []


@pytest.mark.parametrize("line", COMMANDS)
def test_commands(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line, comments=True)[1:]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    if "-o" in words:
        assert Path(words[words.index("-o") + 1]).stat().st_size > 0


def test_there_are_commands() -> None:
    assert {shlex.split(line)[1] for line in COMMANDS} == {"find", "rewrite", "export"}


def test_two_commands_on_the_first_screen() -> None:
    first_screen = README.splitlines()[:20]
    lines = [line for line in first_screen if line.startswith(INSTALL)]
    assert [line.rsplit("&& ", 1)[1] for line in lines] == [".venv/bin/resfx demo", ".venv/bin/python -m pytest"]


def test_ci_runs_the_command_of_the_readme() -> None:
    """.ci/run finds its test command by this pattern: it must match one line."""
    (pattern,) = re.findall(r"grep -E '(.*)' README\.md", (ROOT / ".ci" / "run").read_text())
    assert [line for line in README.splitlines() if re.search(pattern, line)] == [
        f"{INSTALL} -e '.[test]' --config-settings editable_mode=strict && .venv/bin/python -m pytest"
    ]
