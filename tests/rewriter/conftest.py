"""Fixtures of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a checkpoint goes; it does not exist yet."""
    return tmp_path / "checkpoint"
