"""ONNX functions for torch operators that the exporter has no translation for, by the operator's qualified name."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from torch.export import ExportedProgram

Function = Callable[..., Any]

_known: dict[str, str] = {}


def register_function(name: str, function: str) -> None:
    """Translate the operator `namespace::name` by `function`, "package.module:function", imported where it is needed.

    It gets the operator's arguments as ONNX values and returns an ONNX value, as in `to_onnx(functions=...)`.
    """
    _known[name] = function


def functions_for(program: ExportedProgram, given: Mapping[Function, Function] | None) -> dict[Function, Function]:
    """The registered functions of the operators in `program`, and those `given`, which come first."""
    table: dict[Function, Function] = {}
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
        if schema is not None and schema.name in _known:
            table[node.target] = pkgutil.resolve_name(_known[schema.name])
    return {**table, **(given or {})}
