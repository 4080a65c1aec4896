"""Operators that the ONNX exporter does not know, by registered functions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import resfx
from resfx.export.onnx_translations import grouped_mm


@torch.library.custom_op("resfx_test::grouped_mm", mutates_args=())
def grouped(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times its own matrix; zeros past the last group."""
    result, start = rows.new_zeros(rows.shape[0], weight.shape[2]), 0
    for group, end in enumerate(ends.tolist()):
        result[start:end] = rows[start:end] @ weight[group]
        start = end
    return result


@grouped.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 5))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        return grouped(rows, self.weight, ends)


def call(ends: list[int]) -> tuple[Tensor, Tensor]:
    return torch.randn(10, 8), torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("ends", [[3, 3, 7, 9], [0, 0, 0, 10], [10, 10, 10, 10]])
def test_grouped_mm(ends: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty groups, rows past the last group; `to_onnx` compares with PyTorch itself."""
    monkeypatch.setattr("resfx.export.onnx_functions._known", {})
    with pytest.raises(resfx.export.OnnxExportError, match=r"resfx_test\.grouped_mm"):
        resfx.export.to_onnx(Experts(), tmp_path / "no.onnx", call(ends))
    resfx.export.register_function("resfx_test::grouped_mm", "resfx.export.onnx_translations:grouped_mm")
    report = resfx.export.to_onnx(Experts(), tmp_path / "experts.onnx", call(ends))
    assert len(report.checks) >= 4


def test_what_the_caller_gives_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxscript import opset18 as op

    monkeypatch.setattr("resfx.export.onnx_functions._known", {})
    resfx.export.register_function("resfx_test::grouped_mm", "resfx.export.onnx_translations:grouped_mm")
    wrong = {torch.ops.resfx_test.grouped_mm.default: lambda rows, weight, ends: op.Neg(grouped_mm(rows, weight, ends))}
    with pytest.raises(resfx.export.OutputMismatchError):
        resfx.export.to_onnx(Experts(), tmp_path / "wrong.onnx", call([3, 3, 7, 9]), functions=wrong)
