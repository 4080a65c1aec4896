"""From an exported program to an ONNX file: translation, readable names, external data, onnx.checker."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from resfx.export.blame import chain, first_line, source_in_text
from resfx.export.errors import OnnxExportError, OnnxRunError
from resfx.export.quiet import quiet_failure
from resfx.export.run import PREFIX

# A protobuf file ends at 2 GiB; the graph itself and its names need room too.
INLINE_LIMIT = 2**31 - 2**27
_OP = re.compile(
    r"(?:OpOverload\(op='(?P<op>[\w.]+)', overload='(?P<overload>\w+)'\))|(?:torch\.ops\.(?P<target>[\w.]+))"
)


def translate(
    program: ExportedProgram,
    inputs: Sequence[str],
    outputs: Sequence[str],
    opset: int | None,
    functions: Mapping[Callable[..., Any], Callable[..., Any]],
) -> torch.onnx.ONNXProgram:
    """The program as ONNX.

    Raises OnnxExportError with the operator that has no translation and its source line, or where the exporter could
    not reach the `opset` asked for.
    """
    import onnx

    _forget_strides(program)
    try:
        with quiet_failure(), _without_torchvision_notes():
            result = torch.onnx.export(
                program,
                input_names=list(inputs),
                output_names=list(outputs),
                opset_version=opset,
                custom_translation_table=dict(functions) or None,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # the exporter wraps some errors and lets others through
        raise OnnxExportError(_explain(error, program)) from error
    assert result is not None  # None is the legacy exporter's answer
    reached = opset_of(result)
    if opset is not None and reached != opset:
        raise OnnxExportError(
            f"the exporter writes opset {reached} and could not convert the model to {opset}: ask for one from {reached}"
            f" to {onnx.defs.onnx_opset_version()}"
        )
    return result


def _forget_strides(program: ExportedProgram) -> None:
    """Make the graph independent of strides, which ONNX does not have, in place: the same numbers, no new ONNX node.

    Passes of the exporter give the result of attention other strides than the trace did; a view that was traced on it
    does not fit them and stops the exporter. So attention results are made contiguous and views become reshapes.
    """
    graph = program.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default
        if node.target is torch.ops.aten.scaled_dot_product_attention.default:
            with graph.inserting_after(node):
                copy = graph.call_function(
                    torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
                )
            copy.meta = dict(node.meta)
            node.replace_all_uses_with(copy, delete_user_cb=lambda user, copy=copy: user is not copy)
    program.graph_module.recompile()


@contextmanager
def _without_torchvision_notes() -> Iterator[None]:
    """The exporter warns at every start where torchvision is missing; a model that needs one of its operators fails by that name.

    Private: the logger's name. Where it changes, the warnings are back.
    """
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")

    def keeps(record: logging.LogRecord) -> bool:
        return "torchvision is not installed" not in record.getMessage()

    logger.addFilter(keeps)
    try:
        yield
    finally:
        logger.removeFilter(keeps)


def opset_of(program: torch.onnx.ONNXProgram) -> int:
    """The version of the default operator set the model uses."""
    return int(program.model.opset_imports[""])


def rename(program: torch.onnx.ONNXProgram, symbols: Mapping[str, str]) -> None:
    """Give weights the model's own names and open sizes the names in `symbols`, in place."""
    import onnx_ir as ir

    graph = program.model.graph
    taken = {value.name for value in _values(graph)} | set(graph.initializers)
    for name, value in list(graph.initializers.items()):
        short = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and short not in taken:
            value.name = short
    for value in _values(graph):
        if value.shape is None or value.shape.frozen:
            continue
        for dim, size in enumerate(value.shape):
            if isinstance(size, ir.SymbolicDim) and size.value is not None:
                value.shape[dim] = _readable(str(size.value), symbols)


def save(program: torch.onnx.ONNXProgram, path: Path) -> None:
    """Write the model: one file, or past 2 GB the weights beside it in `<file name>.data`."""
    size = sum(value.const_value.nbytes for value in program.model.graph.initializers.values() if value.const_value)
    program.save(str(path), external_data=size > INLINE_LIMIT)


def check_file(path: Path) -> None:
    """onnx.checker by path, which is the one way past 2 GB. Raises OnnxRunError."""
    import onnx

    try:
        onnx.checker.check_model(str(path))
    except (onnx.checker.ValidationError, ValueError) as error:
        raise OnnxRunError(f"onnx.checker refuses the exported model: {first_line(error)}") from error


def _values(graph: Any) -> Iterator[Any]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph.all_nodes():
        yield from node.outputs


def _readable(size: str, symbols: Mapping[str, str]) -> int | str:
    """An open size under readable names; a number that the exporter wrote as a name is a number."""
    if size.isdigit():
        return int(size)
    return re.sub(r"\b[su]\d+\b", lambda m: symbols.get(m[0], m[0]), size)


def _explain(error: Exception, program: ExportedProgram) -> str:
    """Which operator stopped the exporter and where the model calls it; says that torch.export passed."""
    links = list(chain(error))
    found = next((m for link in reversed(links) if (m := _OP.search(str(link)))), None)
    if found is None:
        return f"torch.export passed, the ONNX exporter failed: {first_line(links[-1])}"
    name = found["target"] or f"{found['op']}.{found['overload']}"
    missing = "No ONNX function found" in str(links[-1])
    stop = "has no translation for" if missing else "stopped at"
    remedy = "Pass functions={torch op: onnxscript function} to give one, or" if missing else "Rewrite that line, or"
    return (
        f"torch.export passed, the ONNX exporter {stop} {name}{_callers(program, name)}: {first_line(links[-1])}\n"
        f"{remedy} use torch.compile or to_aoti for this model."
    )


def _callers(program: ExportedProgram, name: str) -> str:
    for node in program.graph.nodes:
        if node.op == "call_function" and str(node.target) == name.replace("::", "."):
            return _place(node.meta)
    return ""


def _place(meta: Mapping[str, Any]) -> str:
    modules = [path for path, _ in (meta.get("nn_module_stack") or {}).values()]
    path = modules[-1].removeprefix(PREFIX) if modules else ""
    line = source_in_text(meta.get("stack_trace") or "")
    return (f" in module '{path}'" if path and path != "model" else "") + (f" ({line})" if line else "")


def first_of_dtypes(model: nn.Module, tensors: Mapping[str, torch.Tensor], dtypes: set[torch.dtype]) -> str | None:
    """What holds one of `dtypes`, as text: a parameter, a buffer or an input of the call; None where nothing does."""
    kinds = (("parameter", dict(model.named_parameters())), ("buffer", dict(model.named_buffers())), ("input", tensors))
    for kind, named in kinds:
        for name, tensor in named.items():
            if tensor.dtype in dtypes:
                return f"{kind} {name} is {str(tensor.dtype).removeprefix('torch.')}"
    return None
