"""The small models of tests/cases that are hard to read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from capture_helpers import assert_same, fold_model, tensors

from resfx.capture import CaptureError, capture

CASES = Path(__file__).parent.parent / "cases"


def load(number: str) -> ModuleType:
    (path,) = CASES.glob(f"case{number}_*.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def example(case: ModuleType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (case.inputs() if hasattr(case, "inputs") else (), case.kwargs() if hasattr(case, "kwargs") else {})


@pytest.mark.parametrize("number", ["08", "21", "23", "25", "28", "30", "31", "38", "39"])
def test_case_folds_to_the_same_function(number: str) -> None:
    case = load(number)
    model = case.make()
    args, kwargs = example(case)
    graphed, _ = fold_model(model, args, kwargs)
    assert_same(model, graphed, args, kwargs, backward=getattr(case, "BACKWARD", True))


@pytest.mark.parametrize("number", ["08", "23"])
def test_in_place_updates_are_functional_and_train(number: str) -> None:
    case = load(number)
    graphed, folded = fold_model(case.make(), case.inputs())
    names = [str(node.target) for node in folded.captured.graph.nodes]
    assert not [name for name in names if name.startswith("aten.") and name.split(".")[1].endswith("_")]
    graphed(*case.inputs()).sum().backward()
    assert all(parameter.grad is not None for parameter in graphed.parameters())


def test_a_slice_update_becomes_slice_add_slice_scatter() -> None:
    case = load("23")
    captured = capture(case.make(), case.inputs())
    scatters = [n for n in captured.graph.nodes if "slice_scatter" in str(n.target)]
    assert len(scatters) == 2
    for scatter in scatters:
        value = scatter.args[1]
        assert "add.Tensor" in str(value.target)
        assert "slice.Tensor" in str(value.args[0].target)


def test_checkpoints_keep_their_gradients_and_are_noted() -> None:
    case = load("30")
    graphed, folded = fold_model(case.make(), case.inputs())
    assert any("checkpoint" in note for note in folded.captured.notes)
    graphed(*case.inputs()).sum().backward()
    assert all(parameter.grad is not None for parameter in graphed.parameters())


def test_no_grad_region_gives_no_gradients() -> None:
    case = load("31")
    graphed, _ = fold_model(case.make(), case.inputs())
    graphed(*case.inputs()).sum().backward()
    without = {name.split(".")[1] for name, parameter in graphed.named_parameters() if parameter.grad is None}
    assert without == {"0", "1"}


def test_keyword_only_call_and_ordered_output() -> None:
    case = load("28")
    model = case.make()
    graphed, _ = fold_model(model, (), case.kwargs())
    x = torch.randn(3, 4, 8)
    expected, got = model(x=x), graphed.eval()(x=x)
    assert type(expected) is type(got)
    assert list(expected) == list(got)
    assert all(torch.equal(a, b) for a, b in zip(tensors(expected), tensors(got), strict=True))


def test_data_dependent_control_flow_is_named() -> None:
    case = load("37")
    with pytest.raises(CaptureError) as info:
        capture(case.make(), case.inputs())
    text = str(info.value)
    assert "export route" in text
    assert "case37_data_dependent_skip.py:22" in text
    assert "torch.cond" in text
    assert info.value.__cause__ is not None
