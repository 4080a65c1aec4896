"""The forms in ONNX: every named function computes what it does in torch, and a file shows one node for each read or write."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from new_parameters import perturb
from torch import fx, nn

import resfx
from resfx.passes import ops
from resfx.passes.onnx_ops import NAMED

D, SITES = 16, 6

# Arguments after the values: what a function is called with, "v" for a value of the stream, "d" a vector, "m2" [D, 2 D], ..
CALLS: dict[Callable[..., Any], list[tuple[Any, ...]]] = {
    ops.delta_read: [("v", ["v", "v", "v"], "d", "d", 1e-6, "dim")],
    ops.grouped_delta_read: [("v", ["v", "v", "v"], "d", "d", 1e-6, "dim", [], 2)],
    ops.single_read: [("v", "v")],
    ops.routed_read: [(["v", "v"], "d", "d", 1e-6, "dim"), (["v", "v", "v"], "d", "d", 1e-6, "dim", "dtype")],
    ops.grouped_routed_read: [(["v", "v", "v"], "d", "d", 1e-6, "dim", "dtype", [], 2)],
    ops.pool: [(["v", "v"], "d", 1e-6, "dim"), (["v", "v", "v"], "d", 1e-6, "dim", "dtype")],
    ops.independent_mix: [
        (["v", "v", "v"], "v", "d", "n3", 1e-6, "dim"),
        (["v"], "v", "d", "n1", 1e-6, "dim", "dtype"),
    ],
    ops.competitive_mix: [(["v", "v"], "v", "d", "n1", 1e-6, "dim"), (["v"], "v", "d", "n1", 1e-6, "dim", "dtype")],
    ops.review_write: [("v", "v", "m2", "d", 1e-5, "dim"), ("v", "v", "m2", "d", 1e-5, "dim", 2.0)],
    ops.highway_write: [("v", "v", "m1", "d", "dim"), ("v", "v", "m1", "d", "dim", 2.0)],
    ops.convex_highway_write: [("v", "v", "m1", "d", "dim")],
    ops.scaled_write: [("v", "v", 0.3), ("v", "v", 0.3, 2)],
    ops.learned_scaled_write: [("v", "v", "s", 1.7), ("v", "v", "s", 1.7, 3)],
}


def every_call(dim: int, dtype: torch.dtype) -> nn.Module:
    """One graph with all of them: each works on inputs of its own, and all results are outputs."""
    root, graph = nn.Module(), fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    made = 0

    def argument(spec: Any) -> Any:
        nonlocal made
        made += 1
        if isinstance(spec, list):
            return [argument(entry) for entry in spec]
        shapes = {"d": (D,), "m1": (D, D), "m2": (D, 2 * D), "s": (), "n1": (1,), "n3": (3,)}
        if spec == "v":
            return graph.call_function(torch.mul, (x if made % 2 else y, 0.25 + made % 7))
        if spec in shapes:
            root.register_parameter(f"p{made}", nn.Parameter(torch.randn(shapes[spec], dtype=dtype)))
            return graph.get_attr(f"p{made}")
        return {"dim": dim, "dtype": dtype}.get(spec, spec) if isinstance(spec, str) else spec

    results = []
    for function, calls in CALLS.items():
        for call in calls:
            result = graph.call_function(function, tuple(argument(spec) for spec in call))
            many = function in (ops.independent_mix, ops.competitive_mix)
            count = len(call[0]) if many else 1
            results.extend(
                graph.call_function(ops.pick, (result, k)) for k in range(count)
            ) if many else results.append(result)
    graph.output(tuple(results))
    return fx.GraphModule(root, graph)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize(("dim", "shape"), [(-1, (2, 5, D)), (1, (2, D, 3, 4))])
def test_every_function(dim: int, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    """`to_onnx` compares every output with the functions themselves, on two batch sizes."""
    assert set(CALLS) == set(NAMED)
    torch.manual_seed(0)
    inputs = (torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype))
    report = resfx.export.to_onnx(every_call(dim, dtype), tmp_path / "m.onnx", inputs)
    assert len(report.checks) == 4
    inline = resfx.export.to_onnx(every_call(dim, dtype), tmp_path / "inline.onnx", inputs, inline=True)
    assert len(inline.checks) == 4
    assert not onnx.load(inline.path).functions
    calls = Counter(node.op_type for node in onnx.load(report.path).graph.node if node.domain == "resfx")
    assert calls == Counter(NAMED[function][0] for function, found in CALLS.items() for _ in found)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(D), nn.Linear(D, D)) for _ in range(SITES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


EXPECTED = {
    "delta": {"DeltaRead": SITES - 1},
    "delta(granularity=block, block_size=2, seeded=True)": {"DeltaRead": SITES},
    "attention_residual": {"AttentionResidualRead": SITES},
    "multi_gate": {"MultiGatePool": SITES, "MultiGateWrite": SITES - 3},
    "review": {"ReviewWrite": SITES},
    "highway": {"HighwayWrite": SITES},
    "scaled_loop(loops=2)": {"ScaledLoopWrite": 2 * SITES},
    "scaled_loop(learnable=True)": {"ScaledLoopWrite": SITES},
}


@pytest.mark.parametrize("spec", EXPECTED)
def test_one_node_for_each_read_or_write(spec: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, D)
    net = resfx.rewrite(Net(), resfx.passes.from_spec(spec), (x,))
    perturb(net)
    report = resfx.export.to_onnx(net, tmp_path / "m.onnx", (x,))
    file = onnx.load(report.path)
    assert Counter(node.op_type for node in file.graph.node if node.domain == "resfx") == EXPECTED[spec]
    assert {function.name for function in file.functions} == set(EXPECTED[spec])
    assert len(report.checks) == 4
