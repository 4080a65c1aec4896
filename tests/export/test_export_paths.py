"""Output files appear whole or not at all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resfx.export.errors import OutputPathError
from resfx.export.paths import checked_path, staged
from resfx.patterns.errors import ResfxError


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputPathError, match="is a folder"):
        checked_path(tmp_path)
    with pytest.raises(OutputPathError, match="does not exist"):
        checked_path(tmp_path / "missing" / "m.onnx")
    with pytest.raises(OutputPathError, match="is a file, not a folder"):
        checked_path(tmp_path / "file" / "m.onnx")
    with pytest.raises(OutputPathError, match=r"must end in .pt2"):
        checked_path(tmp_path / "m.onnx", suffix=".pt2")
    assert issubclass(OutputPathError, ResfxError)


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere, so the answer is given here
    with pytest.raises(OutputPathError, match="cannot be written"):
        checked_path(tmp_path / "m.onnx")


def test_success_moves_every_file(tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    target.write_text("old")
    with staged(target) as file:
        file.write_text("new")
        (file.parent / "m.onnx.data").write_text("weights")
        assert target.read_text() == "old"
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {"m.onnx": "new", "m.onnx.data": "weights"}


def _fail_while_writing(target: Path) -> None:
    with staged(target) as file:
        file.write_text("half")
        raise KeyboardInterrupt


def test_failure_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        _fail_while_writing(target)
    assert {f.name: f.read_text() for f in tmp_path.iterdir()} == {"m.onnx": "old"}


def test_import_is_light() -> None:
    code = "import sys, resfx.export; print([m for m in ('onnx', 'onnxruntime', 'onnxscript') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
