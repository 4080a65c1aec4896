"""Run an ONNX file in ONNX Runtime on the CPU and compare it with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from resfx.export.blame import first_line
from resfx.export.compare import Difference, compare
from resfx.export.errors import OnnxRunError
from resfx.export.feeds import Feed

# ONNX Runtime's fusions have changed the numbers of graphs whose sums are read several times: both settings count.
SETTINGS = ("off", "on")
# What its CPU provider has no matrix product for. float16 runs: it computes in float32 between casts.
UNSUPPORTED = {torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}


def check_runs(
    path: Path,
    inputs: Sequence[str],
    outputs: Sequence[str],
    feeds: Mapping[str, Feed],
    tolerance: float,
) -> dict[tuple[str, str], tuple[Difference, ...]]:
    """Differences by (optimisation setting, label of the feed); `inputs` and `outputs` are the names in the file.

    Raises OutputMismatchError at the first output that differs, OnnxRunError where ONNX Runtime cannot load or run it.
    """
    result = {}
    for setting in SETTINGS:
        session = _session(path, setting)
        for label, feed in feeds.items():
            where = f"ONNX Runtime (graph optimisations {setting}, {label})"
            got = _run(session, dict(zip(inputs, feed.inputs, strict=True)), where)
            result[setting, label] = compare(outputs, got, feed.expected, tolerance, where)
    return result


def _session(path: Path, setting: str) -> _Session:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if setting == "on" else level.ORT_DISABLE_ALL
    try:
        return _Session(onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]))
    except Exception as error:  # its errors share no base class of their own
        raise OnnxRunError(
            f"ONNX Runtime cannot load the model on the CPU (graph optimisations {setting}): {first_line(error)}\n"
            "check=False writes the file without this check, for another runtime."
        ) from error


class _Session:
    """An InferenceSession that takes and returns tensors."""

    def __init__(self, session: object) -> None:
        self._session = session

    def run(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        wanted = {entry.name for entry in self._session.get_inputs()}  # type: ignore[attr-defined]
        feed = {name: tensor.detach().cpu().numpy() for name, tensor in inputs.items() if name in wanted}
        return [torch.as_tensor(array) for array in self._session.run(None, feed)]  # type: ignore[attr-defined]


def _run(session: _Session, inputs: Mapping[str, Tensor], where: str) -> list[Tensor]:
    try:
        return session.run(inputs)
    except Exception as error:  # as above
        raise OnnxRunError(f"{where} cannot run the model: {first_line(error)}") from error
