"""Reads taken together, by Triton's interpreter, against the formula over all their sources; and which reads the pass puts together.

The kernels run in processes of their own (`group_probe.py`): Triton is told to interpret before it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from operator import getitem
from pathlib import Path

import pytest
import torch
from passes_toys import Toy, capture, perturb, relative, stream_of

import resfx
from resfx.passes import apply, group_kernels, ops, schedule
from resfx.passes.form import Form

pytest.importorskip("triton")

PROBE = Path(__file__).parent / "group_probe.py"
GROUPED = (ops.grouped_delta_read, ops.grouped_routed_read)
FORMS: list[Form] = [
    resfx.DeltaAttention(),
    resfx.DeltaAttention(granularity="block", block_size=4),
    resfx.DeltaAttention(null_source=True, gate="scalar"),
    resfx.AttentionResidual(),
    resfx.AttentionResidual(granularity="block", block_size=3),
]


def interpreted(*arguments: str) -> dict[str, float]:
    """The deviations that the probe prints, by name."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(PROBE), *arguments]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


LIMITS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 2**-7}


@pytest.mark.parametrize("dtype", LIMITS)
def test_values_and_gradients_are_those_of_the_formula(dtype: str) -> None:
    """Groups of 1 to 8 readers, one building on the other, over up to 34 sources: several launches, and several bundles."""
    found = interpreted("gradients", dtype)
    assert len(found) > 20
    assert {name: value for name, value in found.items() if not value < LIMITS[dtype]} == {}


def test_derivatives_of_other_kinds() -> None:
    """Second derivatives, and samples of torch.func.vmap."""
    found = interpreted("derivatives", "float64")
    assert found.keys() == {"second", "vmap", "forward"}
    assert max(found.values()) < 1e-10


def test_a_whole_model(tmp_path: Path) -> None:
    found = interpreted("model", "float64")
    assert len(found) == 2 * len(FORMS)
    assert max(found.values()) < 1e-9


@pytest.mark.parametrize("most", [2, 4, 8])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.to_spec())
def test_without_kernels_a_model_computes_what_it_does_without_groups(
    form: Form, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = Toy(layers=14, d=8).double(), torch.randn(2, 3, 8).double()
    results = []
    for size in (1, most):
        monkeypatch.setattr(group_kernels, "MOST_READERS", size)
        graph_module = capture(model, x)
        apply(graph_module, stream_of(graph_module), form)
        perturb(graph_module)
        results.append(graph_module(x))
        assert size > 1 or not any(node.target in GROUPED for node in graph_module.graph.nodes)
    assert torch.equal(*results)


def test_groups_share_what_comes_before_them() -> None:
    x = torch.randn(2, 3, 8)
    graph_module = capture(Toy(layers=14, d=8), x)
    apply(graph_module, stream_of(graph_module), resfx.DeltaAttention())
    groups = [node for node in graph_module.graph.nodes if node.target is ops.group_read]
    reads = [node for node in graph_module.graph.nodes if node.target is ops.grouped_delta_read]
    assert len(groups) > 1
    assert len(reads) == sum(len(group.args[2]) for group in groups)
    assert [group.args[-1] for group in groups] == [False] * (len(groups) - 1) + [True]  # only the last one is the last
    assert all(group.args[-2] for group in groups)  # the state is the sum of the sources
    for earlier, group in pairwise(groups):
        assert group.args[0].target is getitem
        assert group.args[0].args == (earlier, 0)
    known = [source for group in groups for source in group.args[1]]
    assert len(known) == len(set(known))  # every source comes in once
    assert all(list(read.args[1])[: read.args[-1]] == known[: read.args[-1]] for read in reads)


def test_a_state_is_taken_from_a_group_only_where_it_is_the_sum_of_its_sources() -> None:
    graph = torch.fx.Graph()
    x, a, b = (graph.placeholder(name) for name in "xab")
    state = graph.call_function(torch.add, (graph.call_function(torch.add, (x, a)), b))
    assert schedule.is_sum(state, [x, a, b])
    assert not schedule.is_sum(state, [x, a])
    assert not schedule.is_sum(state, [x, a, b, b])
    assert not schedule.is_sum(graph.call_function(torch.add, (state, a)), [x, a, b])
    assert not schedule.is_sum(graph.call_function(torch.sub, (x, a)), [x, a])
    assert not schedule.is_sum(graph.call_function(torch.add, (x, a), {"alpha": 2}), [x, a])


def test_short_models_keep_their_reads() -> None:
    x = torch.randn(2, 3, 32)
    graph_module = capture(Toy(layers=4), x)
    apply(graph_module, stream_of(graph_module), resfx.DeltaAttention())
    assert not any(node.target is ops.group_read for node in graph_module.graph.nodes)


def test_wide_streams_have_smaller_groups() -> None:
    """The sums of a group's readers stay in registers."""
    assert schedule.most_readers(1024) == group_kernels.MOST_READERS
    assert schedule.most_readers(8192) == 2
    assert schedule.most_readers(1 << 15) == 1


def test_an_exported_model_is_plain_operations() -> None:
    x = torch.randn(2, 3, 8)
    graph_module = capture(Toy(layers=14, d=8), x)
    apply(graph_module, stream_of(graph_module), resfx.DeltaAttention())
    for strict in (False, True):
        program = torch.export.export(graph_module, (x,), strict=strict)
        targets = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
        assert not any("resfx" in target or "HigherOrder" in target for target in targets), targets
        assert relative(program.module()(x), graph_module(x)) < 1e-6
