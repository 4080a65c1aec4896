"""One name for every spelling of an operation."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph
from torch.nn import functional as F

from resfx.patterns.dialect import data_inputs, is_custom, module_path, op_name, source_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("add", [operator.add, operator.iadd, torch.add, aten.add.Tensor, aten.add_.Tensor, "add", "add_", "__radd__"]),
        ("sub", [operator.sub, operator.isub, torch.sub, torch.subtract, aten.sub.Tensor, "sub_", "subtract"]),
        ("rsub", [aten.rsub.Scalar, torch.rsub, "__rsub__"]),
        ("mul", [operator.mul, operator.imul, torch.mul, torch.multiply, aten.mul.Scalar, "mul_", "__rmul__"]),
        ("div", [operator.truediv, operator.itruediv, torch.div, torch.true_divide, aten.div.Tensor, "div_"]),
        ("neg", [operator.neg, torch.neg, torch.negative, aten.neg.default]),
        ("matmul", [operator.matmul, torch.matmul, aten.matmul.default, "__matmul__"]),
        (
            "transpose",
            [torch.t, torch.transpose, torch.swapaxes, aten.transpose.int, aten.t.default, "t", aten.mT.default],
        ),
        ("cat", [torch.cat, torch.concat, torch.concatenate, aten.cat.default]),
        ("addcmul", [torch.addcmul, aten.addcmul.default, aten.addcmul_.default, "addcmul_"]),
        ("dropout", [F.dropout, torch.dropout, aten.dropout.default, aten.dropout_.default]),
        ("layer_norm", [F.layer_norm, torch.layer_norm, aten.layer_norm.default]),
        ("relu", [F.relu, torch.relu, torch.relu_, aten.relu.default, aten.relu_.default, "relu_"]),
        ("linear", [F.linear, aten.linear.default]),
        ("attention", [F.scaled_dot_product_attention, aten.scaled_dot_product_attention.default]),
        ("getitem", [operator.getitem, "__getitem__"]),
        ("pow", [operator.pow, operator.ipow, torch.pow, aten.pow.Tensor_Scalar, "pow_", "__pow__"]),
        ("_to_copy", [aten._to_copy.default]),
    ],
)
def test_op_name(name: str, spellings: list[Callable[..., Any] | str]) -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for spelling in spellings:
        node = graph.call_method(spelling, (x,)) if isinstance(spelling, str) else graph.call_function(spelling, (x,))
        assert op_name(node) == name, spelling


def test_attributes_that_hold_numbers() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    names = {"T": "T", "mT": "transpose", "H": "transpose", "data": "detach", "real": "real", "shape": "getattr"}
    for attribute, name in names.items():
        node = graph.call_function(getattr, (x, attribute))
        assert op_name(node) == name
        assert list(data_inputs(node)) == ([] if name == "getattr" else [x])


def test_nodes_that_compute_nothing_have_the_name_of_their_kind() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    assert [op_name(x), op_name(graph.get_attr("w")), op_name(graph.output(x))] == ["placeholder", "get_attr", "output"]


def test_custom_operators() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    assert is_custom(graph.call_function(torch.ops.higher_order.cond, (x,)))
    assert is_custom(graph.call_function(torch.ops.quantized.linear_dynamic, (x,)))
    assert not is_custom(graph.call_function(aten.relu, (x,)))
    assert not any(is_custom(graph.call_function(f, (x,))) for f in (aten.add.Tensor, torch.relu, math.sqrt))
    assert not is_custom(x)


def test_source_is_the_innermost_frame_outside_torch() -> None:
    node = Graph().placeholder("x")
    assert source_of(node) == ""
    own, inside, generated = "/home/me/model.py", f"{torch.__path__[0]}/nn/modules/module.py", "<eval_with_key>.0"
    frames = [(own, 3), (own, 7), (inside, 9), (generated, 1)]
    node.meta["stack_trace"] = "".join(f'  File "{file}", line {line}, in forward\n' for file, line in frames)
    assert source_of(node) == f"{own}:7"


def test_module_path_leaves_out_the_number_of_the_call() -> None:
    node = Graph().placeholder("x")
    assert module_path(node) == ""
    node.meta["nn_module_stack"] = {"a": ("", "Model"), "b": ("layers.0", "Block"), "c": ("layers.0.norm@1", "Norm")}
    assert module_path(node) == "layers.0.norm"
