"""ONNX of rewritten models: checked by the export itself, and here in ONNX Runtime on sizes it has not seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from models_steps import FORMS, outputs, pairs
from models_zoo import ZOO
from new_parameters import perturb
from torch import Tensor

import resfx


def run_onnx(path: Path, report: resfx.export.OnnxReport, args: Any, kwargs: Any, *, optimised: bool) -> list[Any]:
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    feeds = {port.name: value.numpy() for port, value in zip(report.inputs, values, strict=True)}
    return list(session.run(None, feeds))


@pytest.mark.parametrize(("name", "form"), list(pairs()))
def test_onnx(name: str, form: str, tmp_path: Path) -> None:
    entry = ZOO[name]
    model, args, kwargs = entry.build()
    result = resfx.rewrite(model, FORMS[form](), args, kwargs)
    perturb(result)
    path = tmp_path / "model.onnx"
    report = resfx.export.to_onnx(result, path, args, kwargs)
    calls = [entry.inputs(5)] if entry.longer is None else [entry.inputs(5), entry.longer(3)]
    for other, other_kwargs in calls:
        want = list(outputs(result, other, other_kwargs).values())
        for optimised in (False, True):
            got = run_onnx(path, report, other, other_kwargs, optimised=optimised)
            assert len(got) == len(want)
            for ours, theirs in zip(got, want, strict=True):
                assert ours.dtype == np.float32
                assert float(np.linalg.norm(ours - theirs.numpy())) <= 2e-5 * float(torch.linalg.vector_norm(theirs))
