"""A failing export prints nothing: torch logs tracebacks and graphs before it raises."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from resfx.export.onnx_graph import _without_torchvision_notes
from resfx.export.quiet import quiet_failure

USER = """
import sys, torch, resfx
from torch import nn

class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(9, 8)

    def forward(self, x):
        return x + self.g(self.f(x)) if torch.compiler.is_exporting() else x

class Fork(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > 0 else x

def onnx(model, args):
    resfx.export.to_onnx(model, "m.onnx", args)

def aoti(model, args):
    resfx.export.to_aoti(model, "m.pt2", args)

# find has a second route for Wrong: the model is not told that it's being exported, and holds no residual then.
for job, model in ((resfx.find, Fork()), (onnx, Fork()), (onnx, Wrong()), (aoti, Fork()), (aoti, Wrong())):
    try:
        job(model, (torch.randn(4, 8),))
    except resfx.ResfxError as error:
        assert error.__cause__ is not None
    else:
        raise AssertionError("no error")
assert not resfx.find(Wrong(), (torch.randn(4, 8),)).sites
"""


def printed(folder: Path, **environment: str) -> str:
    (folder / "user.py").write_text(USER)
    variables = {**os.environ, **environment}
    result = subprocess.run([sys.executable, "user.py"], cwd=folder, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_failing_exports_print_nothing(tmp_path: Path) -> None:
    """In a process of its own: pytest takes over the logging of this one."""
    assert printed(tmp_path) == ""


@pytest.mark.slow
def test_torch_logs_that_were_asked_for_appear(tmp_path: Path) -> None:
    assert "failed while attempting to run meta" in printed(tmp_path, TORCH_LOGS="+dynamic")


def test_what_a_success_prints_appears(capsys: pytest.CaptureFixture[str]) -> None:
    with quiet_failure():
        print("fine")
    assert capsys.readouterr().out == "fine\n"


def test_a_failure_is_silent_and_passes_on(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("resfx.test_quiet")

    @quiet_failure()
    def fail() -> None:
        print("lost")
        logger.error("lost too")
        raise KeyError

    with pytest.raises(KeyError):
        fail()
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_missing_torchvision_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    with _without_torchvision_notes():
        logger.warning("torchvision is not installed. Skipping %s", "torchvision::nms")
        logger.warning("other news")
    assert [record.getMessage() for record in caplog.records] == ["other news"]


def test_the_exporter_still_warns_by_that_name() -> None:
    source = inspect.getsource(importlib.import_module("torch.onnx._internal.exporter._registration"))
    assert 'logger.warning("torchvision is not installed' in source
