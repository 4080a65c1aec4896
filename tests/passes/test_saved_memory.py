"""What training keeps: no more than the plain net and one copy of each source, counted by `benchmarks/saved_memory.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="a GPU is pretended with it")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from lowering import nets
from saved_memory import row, saved_in_training

SUBLAYERS, WIDTH = 8, 32


def streams(name: str) -> float:
    x = torch.empty(2, 16, WIDTH, dtype=torch.bfloat16)
    kept = saved_in_training(nets(SUBLAYERS, WIDTH)[name], lambda: torch.empty_like(x))
    return row(kept, x)["streams"]


@pytest.fixture(scope="module")
def plain() -> float:
    return streams("plain")


@pytest.mark.parametrize(
    ("name", "sources"),
    [("delta", SUBLAYERS - 1), ("delta, 4 blocks", 3), ("attention residual", SUBLAYERS), ("scaled loop", 0)],
)
def test_one_copy_of_each_source(name: str, sources: int, plain: float) -> None:
    """h0 is an input. The last update is no source of Delta's, and AttentionResidual reads it at the end."""
    assert streams(name) - plain <= sources


def test_the_published_code_keeps_more(plain: float) -> None:
    """The count can tell."""
    assert streams("published delta") - plain > 4 * SUBLAYERS
