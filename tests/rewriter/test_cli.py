"""The commands: what they print and write, exit codes, and no traceback for a user's mistake."""

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner, Result

import resfx
from resfx.cli import app
from resfx.cli_models import load_model
from resfx.cli_report import graph_text

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(self.norm(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

def net():
    print("the model speaks")
    return Net(), (torch.randn(4, 5, 8),)

def plain():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()), (torch.randn(4, 8),)

class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        if x.sum() > 0:
            return x + self.linear(x)
        return x

def fork():
    return Fork(), (torch.randn(4, 8),)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def call(*words: str) -> Result:
    return CliRunner().invoke(app, words)


def done(*words: str) -> Result:
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result


def machine(*words: str) -> Any:
    return json.loads(done(*words, "--json").stdout)


def refused(code: int, *words: str) -> str:
    """The panel on stderr, on one line; stdout stays empty and there is no traceback."""
    result = call(*words)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


def test_find_prints_the_sites(here: Path) -> None:
    text = done("find", "model.py:net").stdout
    assert all(f"blocks.{index}" in text for index in range(3))
    assert "model.py:11" in text


def test_find_for_machines(here: Path) -> None:
    """stdout is one JSON object; what the model prints goes to stderr."""
    data = machine("find", "model.py:net")
    assert len(data["streams"]) == 1
    assert [site["path"] for site in data["streams"][0]["sites"]] == [f"blocks.{index}" for index in range(3)]


def test_what_a_model_prints_stays_out_of_the_answer(here: Path) -> None:
    result = done("find", "model.py:net")
    assert "the model speaks" not in result.stdout
    assert "the model speaks" in result.stderr


def test_explain(here: Path) -> None:
    text = done("find", "model.py:net", "--explain", "blocks.1").stdout
    assert "model.py:11" in text
    assert "site 1 of stream 0" in text


def test_rewrite_without_output_shows_the_change_and_writes_nothing(here: Path) -> None:
    text = done("rewrite", "model.py:net", "--form", "delta").stdout
    added = [line for line in text.splitlines() if line.startswith("+")]
    assert any("residual" in line and "query" in line for line in added)
    assert "stream 0: 3 sites" in text
    assert [path.name for path in here.iterdir() if path.name != "__pycache__"] == ["model.py"]


def test_rewrite_prints_the_graph(here: Path) -> None:
    text = done("rewrite", "model.py:net", "--form", "review", "--graph").stdout
    assert "def forward" in text


def test_a_source_line_is_shown_once(here: Path) -> None:
    """All nodes of the blocks come from one line of the model; the norm at the end from another."""
    model, known = load_model("model.py:net")
    assert known is not None
    text = graph_text(resfx.rewrite(model, resfx.DeltaAttention(), *known))
    lines = [line for line in text.splitlines() if line.lstrip().startswith("# model.py")]
    assert [line.split(": ", 1)[1] for line in lines] == ["return x + self.linear(self.norm(x))", "return self.norm(x)"]
    assert not any(line != line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("form", ["delta", "review", "scaled_loop"])
def test_a_saved_rewrite_runs_like_the_model_itself(here: Path, form: str) -> None:
    data = machine("rewrite", "model.py:net", "--form", form, "--warm-start", "-o", "out.pt2")
    assert data["output"] == "out.pt2"
    assert data["sites"] == {"0": 3}
    torch.manual_seed(0)
    model, known = load_model("model.py:net")
    assert known is not None
    saved = torch.export.load("out.pt2")
    names = [name for name in saved.state_dict if name.startswith("residual.")]
    assert sum(saved.state_dict[name].numel() for name in names) == data["parameters_added"] > 0
    wider = torch.randn(7, 5, 8)
    torch.testing.assert_close(saved.module()(wider), model(wider), rtol=1e-5, atol=1e-6)


def test_a_saved_rewrite_is_a_model_again(here: Path) -> None:
    done("rewrite", "model.py:net", "--form", "scaled_loop", "-o", "out.pt2")
    assert len(machine("find", "out.pt2")["streams"][0]["sites"]) == 3


def test_select_and_stream(here: Path) -> None:
    data = machine("rewrite", "model.py:net", "--form", "review", "--select", "blocks.1")
    assert data["parameters"] == {"residual.0.1.weight": [8, 16], "residual.0.1.bias": [8]}
    assert machine("rewrite", "model.py:net", "--form", "review", "--stream", "0")["sites"] == {"0": 3}
    assert "blocks.9" in refused(1, "rewrite", "model.py:net", "--form", "review", "--select", "blocks.9")


def test_seed(here: Path) -> None:
    for name in ("a", "b"):
        done("rewrite", "model.py:net", "--form", "scaled_loop", "--seed", "7", "-o", f"{name}.pt2")
    done("rewrite", "model.py:net", "--form", "scaled_loop", "--seed", "8", "-o", "c.pt2")
    weights = [torch.export.load(f"{name}.pt2").state_dict["blocks.0.linear.weight"] for name in "abc"]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_dtype(here: Path) -> None:
    done("rewrite", "model.py:net", "--form", "review", "--dtype", "bfloat16", "-o", "out.pt2")
    dtypes = {tensor.dtype for tensor in torch.export.load("out.pt2").state_dict.values()}
    assert dtypes == {torch.bfloat16}


def test_frontend(here: Path) -> None:
    sites = machine("find", "model.py:net", "--frontend", "fx")["streams"][0]["sites"]
    assert [site["path"] for site in sites] == [f"blocks.{index}" for index in range(3)]


def test_inputs_of_another_shape(here: Path) -> None:
    data = machine("find", "model.py:Net", "--input", "x=float32[3,2,8]")
    assert len(data["streams"][0]["sites"]) == 3


def test_export_to_onnx(here: Path) -> None:
    data = machine("export", "model.py:net", "--form", "delta", "--to", "onnx", "-o", "net.onnx")
    assert data["report"]["path"].endswith("net.onnx")
    assert (here / "net.onnx").stat().st_size > 0
    text = done("export", "model.py:net", "--form", "delta", "--to", "onnx", "-o", "net.onnx").stdout
    assert "net.onnx" in text
    assert {function.name for function in onnx.load(here / "net.onnx").functions} == {"DeltaRead"}


def test_inline_export(here: Path) -> None:
    done("export", "model.py:net", "--form", "delta", "--to", "onnx", "--inline", "-o", "net.onnx")
    assert not onnx.load(here / "net.onnx").functions
    refused(2, "export", "model.py:net", "--form", "delta", "--to", "aoti", "--inline", "-o", "net.pt2")


@pytest.mark.slow
def test_export_to_aoti(here: Path) -> None:
    done("export", "model.py:net", "--form", "delta", "--to", "aoti", "-o", "net.pt2")
    assert (here / "net.pt2").stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["find", "model.py:nothing"], "has no 'nothing'"),
        (["find", "missing.py:net"], "no file missing.py"),
        (["find", "model.py:Net"], "Net.forward needs x"),
        (["find", "model.py:net", "--input", "y=float32[2,8]"], "no argument 'y'"),
        (["find", "model.py:net", "--frontend", "jit"], "'--frontend': 'jit' is not one of 'export', 'fx'"),
        (
            ["find", "model.py"],
            "Try: model.py:Block, model.py:Net, model.py:net, model.py:plain, model.py:Fork, model.py:fork",
        ),
        (["find", "model.py:net", "--explain", "blocks.9"], "Nearest: blocks.2, blocks.1, blocks.0"),
        (["rewrite", "model.py:net", "--form", "delta", "--stream", "5"], "5"),
        (["find", "model.py:net", "--nothing"], "No such option"),
        (["rewrite", "model.py:net"], "Missing option '--form'"),
        (["rewrite", "model.py:net", "--form", "nothing"], "delta"),
        (["rewrite", "model.py:net", "--form", "delta(nothing=1)"], "granularity"),
        (["rewrite", "model.py:net", "--form", "delta", "-o", "."], "folder"),
        (["rewrite", "model.py:net", "--form", "delta", "-o", "a/b.pt2"], "does not exist"),
        (["rewrite", "model.py:net", "--form", "delta", "-o", "b.onnx"], ".pt2"),
        (["export", "model.py:net", "--form", "delta", "--to", "tflite", "-o", "b.onnx"], "'tflite' is not one of"),
        (["export", "model.py:net", "--form", "delta", "--to", "onnx", "-o", "."], "folder"),
    ],
)
def test_usage_errors(here: Path, words: list[str], reason: str) -> None:
    assert reason in refused(2, *words)
    assert sorted(path.name for path in here.iterdir() if path.name != "__pycache__") == ["model.py"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["find", "model.py:plain"], "No residual"),
        (["rewrite", "model.py:plain", "--form", "delta"], "NoResidualFound"),
        (["rewrite", "model.py:plain", "--form", "delta", "-o", "out.pt2"], "NoResidualFound"),
        (["find", "model.py:fork"], "model.py:37"),
        (["find", "model.py:net", "--input", "x=float32[2,7]"], "model.py"),
    ],
)
def test_what_resfx_refuses(here: Path, words: list[str], reason: str) -> None:
    message = refused(1, *words)
    assert reason in message
    assert "did not expect" not in message
    assert sorted(path.name for path in here.iterdir() if path.name != "__pycache__") == ["model.py"]


def test_explain_where_nothing_was_found(here: Path) -> None:
    assert "no sum of two or more" in done("find", "model.py:plain", "--explain", "0").stdout


def test_version() -> None:
    assert done("--version").stdout == f"resfx {version('resfx')}, torch {version('torch')}\n"


@pytest.mark.parametrize("command", ["find", "rewrite", "export", "demo"])
def test_every_option_says_what_it_takes(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A value stands for itself (NAME=VALUE, FILE), not for a Python type."""
    monkeypatch.setenv("COLUMNS", "100")
    text = done(command, "--help").stdout
    assert "--seed N " in text
    assert re.findall(r"--\w+ <\w+", text) == []


def test_errors_for_machines(here: Path) -> None:
    result = call("find", "model.py:plain", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["error"]["type"] == "NoResidualFound"
    assert "NoResidualFound" in result.stderr


def test_debug_shows_the_traceback(here: Path) -> None:
    result = call("find", "model.py:nothing", "--debug")
    assert type(result.exception).__name__ == "UsageError"


def test_a_module_class_of_torch(here: Path) -> None:
    assert isinstance(load_model("torch.nn:Identity")[0], nn.Identity)
