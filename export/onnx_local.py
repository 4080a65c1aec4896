"""Functions inside an ONNX file: a node for each call of a named Python function, and what such a node computes.

A body is built for each call, since a function in ONNX has a fixed number of arguments; equal ones are stored once. Further ones
of the same name are told apart by their `overload`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnx_ir.passes import common

from resfx.export.onnx_calls import named

DOMAIN = "resfx"
_INLINING = (
    common.InlinePass(),
    common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
    common.RemoveUnusedOpsetsPass(),
    common.CommonSubexpressionEliminationPass(),
    common.RemoveUnusedNodesPass(),
    common.NameFixPass(),
)
_ANY = onnx.defs.get_schema("Identity").type_constraints[0].allowed_type_strs


class Nodes:
    """Makes the nodes of one body: `op.Add(a, b, axis=0)` is a node with one output, or with as many as `outputs` says."""

    def __init__(self) -> None:
        self._tape = ir.tape.Tape()
        self._constants: dict[tuple[Any, ...], ir.Value] = {}

    def __getattr__(self, kind: str) -> Callable[..., Any]:
        def make(*inputs: ir.Value | None, outputs: int = 1, **attributes: Any) -> Any:
            made = self._tape.op_multi_out(kind, inputs, attributes, num_outputs=outputs)
            return made[0] if outputs == 1 else list(made)

        return make

    def ints(self, *values: int) -> ir.Value:
        """A list of numbers, as int64."""
        return self._constant(list(values), ir.DataType.INT64)

    def number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """One number without dims."""
        return self._constant(value, dtype)

    def _constant(self, value: Any, dtype: ir.DataType) -> ir.Value:
        key = (str(value), dtype)
        if key not in self._constants:
            made = self._tape.op("Constant", (), {"value": ir.tensor(np.asarray(value, dtype.numpy()))})
            made.dtype = dtype
            self._constants[key] = made
        return self._constants[key]

    @property
    def nodes(self) -> Sequence[ir.Node]:
        return self._tape.nodes


class LocalFunctions:
    """The functions of one export: `translations` for the exporter, then `add_to` for what it made."""

    def __init__(self, operators: Mapping[torch._ops.OpOverload, Callable[..., Any]]) -> None:
        self.translations: dict[Callable[..., Any], Callable[..., Any]] = {
            operator: self._translation(function) for operator, function in operators.items()
        }
        self._made: dict[tuple[str, bytes], ir.Function] = {}

    def add_to(self, program: torch.onnx.ONNXProgram, *, inline: bool) -> None:
        """Put the functions that the model calls into it, or with `inline` what they compute in place of their calls."""
        model = program.model
        called = {node.op_identifier() for node in model.graph.all_nodes()}
        for function in self._made.values():
            if function.identifier() in called:
                function.graph.opset_imports[""] = model.opset_imports[""]
                model.functions[function.identifier()] = function
        if inline and self._made:
            # Not onnxscript's optimizer: it leaves inlined Reshape(x, Shape(y)) out of order. ONNX Runtime folds constants itself.
            ir.passes.Sequential(*_INLINING)(model)

    def _translation(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def translate(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            local, single = self._build(function, given)
            values = [value for argument in given.values() for value in _values(argument)]
            outputs = _call(local, values)
            return outputs[0] if single else outputs

        return translate

    def _build(self, function: Callable[..., Any], given: Mapping[str, Any]) -> tuple[ir.Function, bool]:
        """The function in ONNX for such arguments, and whether it returns one value and no list."""
        known, op = named(function), Nodes()
        inputs: list[ir.Value] = []
        results = known.body(op, **{name: _inside(name, argument, inputs) for name, argument in given.items()})
        single = isinstance(results, ir.Value)
        graph = ir.Graph(inputs, [results] if single else results, nodes=op.nodes, opset_imports={"": 1})
        local = ir.Function(DOMAIN, known.name, graph=graph, attributes=())
        key = (known.name, ir.serde.serialize_function(local).SerializeToString(deterministic=True))
        if key not in self._made:
            number = sum(name == known.name for name, _ in self._made)
            local.overload = str(number + 1) if number else ""
            self._made[key] = local
        return self._made[key], single


def _values(argument: Any) -> list[ir.Value]:
    if isinstance(argument, ir.Value):
        return [argument]
    return [value for value in argument if isinstance(value, ir.Value)] if isinstance(argument, (list, tuple)) else []


def _inside(name: str, argument: Any, inputs: list[ir.Value]) -> Any:
    """The argument as the body sees it: a value of its own for every value."""
    if isinstance(argument, ir.Value):
        inputs.append(ir.Value(name=name, shape=argument.shape, type=argument.type))
        return inputs[-1]
    if isinstance(argument, (list, tuple)):
        return [_inside(f"{name}_{index}", entry, inputs) for index, entry in enumerate(argument)]
    return argument


def _call(function: ir.Function, values: Sequence[ir.Value]) -> list[ir.Value]:
    """The one node, made the way the exporter's own translations make theirs."""
    kinds = onnx.defs.OpSchema.FormalParameter
    schema = onnx.defs.OpSchema(
        function.name,
        function.domain,
        1,
        inputs=[kinds(f"in{i}", f"I{i}") for i in range(len(values))],
        outputs=[kinds(f"out{i}", f"O{i}") for i in range(len(function.outputs))],
        type_constraints=[
            *((f"I{i}", _ANY, "") for i in range(len(values))),
            *((f"O{i}", _ANY, "") for i in range(len(function.outputs))),
        ],
    )
    outputs = onnxscript.values.Op(onnxscript.values.Opset(DOMAIN, 1), function.name, schema)(*values)
    found = list(outputs) if isinstance(outputs, Sequence) else [outputs]
    node = found[0].producer()
    node.overload = function.overload
    return found
