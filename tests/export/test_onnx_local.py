"""Calls of named functions: functions in the file, one node a call, or inlined."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, fx, nn

import resfx.export.onnx_graph as onnx_graph
from resfx.export import OutputMismatchError, TraceError, register_calls, to_onnx


def mean_of(values: Sequence[Tensor], factor: float) -> Tensor:
    """factor times the mean."""
    return factor * sum(values[1:], values[0]) / len(values)


def halves(x: Tensor) -> list[Tensor]:
    """Half of x, twice."""
    return [x / 2, x - x / 2]


def in_onnx_mean(op: Any, values: Sequence[Any], factor: float) -> Any:
    return op.Mul(op.Mean(*values), op.number(factor, values[0].dtype))


def in_onnx_halves(op: Any, x: Any) -> list[Any]:
    half = op.Div(x, op.number(2.0, x.dtype))
    return [half, op.Sub(x, half)]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resfx.export.onnx_calls._known", {})
    register_calls({mean_of: ("Mean", in_onnx_mean), halves: ("Halves", in_onnx_halves)})


def model(layers: int = 3, width: int = 8) -> fx.GraphModule:
    """Linear layers; after each the mean of all states so far, doubled, and its halves added up."""
    root, graph = nn.Module(), fx.Graph()
    x = graph.placeholder("x")
    states = [x]
    for index in range(layers):
        root.add_module(f"layer{index}", nn.Linear(width, width))
        states.append(graph.call_module(f"layer{index}", (states[-1],)))
        mean = graph.call_function(mean_of, (list(states), 2.0))
        both = graph.call_function(halves, (mean,))
        picked = [graph.call_function(operator.getitem, (both, k)) for k in range(2)]
        states.append(graph.call_function(torch.add, tuple(picked)))
    graph.output(states[-1])
    torch.manual_seed(0)
    return fx.GraphModule(root, graph)


def run(path: Path, x: Tensor, optimised: bool) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimised else level.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x.numpy()})[0]


def test_one_node_a_call_and_equal_functions_once(tmp_path: Path) -> None:
    net, x = model(), torch.randn(3, 5, 8)
    want = net(x)
    report = to_onnx(net, tmp_path / "m.onnx", (x,))
    file = onnx.load(report.path)
    onnx.checker.check_model(file, full_check=True)
    calls = [(node.op_type, node.overload) for node in file.graph.node if node.domain == "resfx"]
    assert [name for name, _ in calls] == ["Mean", "Halves"] * 3
    assert sorted((f.name, f.overload) for f in file.functions) == sorted(set(calls))
    assert len(file.functions) == 4, "three numbers of states, and one halves"
    assert report.inputs[0].shape == ("batch", "x_dim1", 8)
    assert len(report.checks) == 4
    longer = torch.randn(4, 7, 8)
    for optimised in (False, True):
        np.testing.assert_allclose(run(report.path, longer, optimised), net(longer).detach(), rtol=1e-5, atol=1e-6)
    assert torch.equal(net(x), want)
    assert sum(node.target is mean_of for node in net.graph.nodes) == 3


def test_inline_gives_the_same_numbers(tmp_path: Path) -> None:
    net, x = model(), torch.randn(3, 5, 8)
    named = to_onnx(net, tmp_path / "named.onnx", (x,)).path
    plain = to_onnx(net, tmp_path / "plain.onnx", (x,), inline=True).path
    file = onnx.load(plain)
    assert not file.functions
    assert {node.domain for node in file.graph.node} == {""}
    assert [entry.domain for entry in file.opset_import] == [""]
    for optimised in (False, True):
        np.testing.assert_allclose(run(named, x, optimised), run(plain, x, optimised), rtol=1e-6, atol=1e-6)


def test_functions_beside_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "INLINE_LIMIT", 100)
    report = to_onnx(model(width=64), tmp_path / "m.onnx", (torch.randn(3, 5, 64),))
    assert (tmp_path / "m.onnx.data").stat().st_size > 0
    assert len(onnx.load(report.path).functions) == 4


@pytest.mark.parametrize("opset", [18, 19, 21])
def test_opset(tmp_path: Path, opset: int) -> None:
    assert to_onnx(model(1), tmp_path / "m.onnx", (torch.randn(3, 5, 8),), opset=opset).opset == opset


def test_a_wrong_body_is_found(tmp_path: Path) -> None:
    register_calls({halves: ("Halves", lambda op, x: [op.Neg(half) for half in in_onnx_halves(op, x)])})
    with pytest.raises(OutputMismatchError):
        to_onnx(model(), tmp_path / "m.onnx", (torch.randn(3, 5, 8),))


def test_the_model_is_left_as_it_was_after_an_error(tmp_path: Path) -> None:
    net = model()
    net.layer0.forward = lambda x: x if float(x.sum()) > 1e9 else x + 1  # type: ignore[method-assign]
    with pytest.raises(TraceError):
        to_onnx(net, tmp_path / "m.onnx", (torch.randn(3, 5, 8),))
    assert sum(node.target is halves for node in net.graph.nodes) == 3
    assert "resfx_onnx" not in net.code
