"""`forward` with the user's own signature on top of a graph with flat inputs and outputs."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from resfx.passes.autocast import ENTER, EXIT
from resfx.signature import CallSignature

_LITERALS = (type(None), bool, int, str)


class CallCodeGen(CodeGen):
    """Generates `def forward(self, <the user's parameters>)`: bind, run the graph, pack the output.

    While torch.export runs in non-strict mode the graph is interpreted instead, so that the exported nodes keep the
    source lines and module paths of the nodes here.
    """

    def __init__(self, signature: CallSignature) -> None:
        super().__init__()
        self.signature = signature

    def __deepcopy__(self, memo: dict[int, Any]) -> CallCodeGen:
        # The signature is immutable and may hold values that don't copy.
        return CallCodeGen(self.signature)

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **options: Any) -> str:
        parameters = self.signature.parameters
        names = [variable.split(":")[0].split("#")[0].strip() for variable in free_vars if variable != "self"]
        values = "".join(f"{name}, " for name in parameters.parameters)
        # Two functions: in the second one no parameter's name hides what the graph needs (torch, device, inf).
        lines = [
            f"def {self._func_name}({self._parameter_list()}):",
            f"    return _run_graph(self, ({values}))",
            "",
            "def _run_graph(self, _values):",
            "    _flat = _call.inputs(_values, self)",
            "    if _interpreted():",
            "        return _call.output(_interpret(self, _flat))",
        ]
        if names:
            lines.append(f"    {', '.join(names)}, = _flat")
        return "\n".join(lines)

    def generate_output(self, output_args: Any, **options: Any) -> str:
        return f"return _call.output({output_args!r})"

    def process_inputs(self, *args: Any) -> Any:
        """For interpreters: the flat inputs as they are, or the user's positional arguments."""
        if len(args) == self.signature.n_inputs and all(isinstance(value, torch.Tensor) for value in args):
            return args
        return self.signature.inputs(self.signature.bind(args, {}))

    def process_outputs(self, outputs: Any) -> Any:
        return self.signature.output(outputs)

    def additional_globals(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = [
            ("_call", self.signature),
            ("_interpreted", _interpreted),
            ("_interpret", _interpret),
        ]
        for name, parameter in self.signature.parameters.parameters.items():
            if parameter.default is not inspect.Parameter.empty and type(parameter.default) not in _LITERALS:
                found.append((f"_default_{name}", parameter.default))
        return found

    def _parameter_list(self) -> str:
        parts = ["self"]
        star = False
        positional_only = 0
        for name, parameter in self.signature.parameters.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
                parts.append(f"*{name}")
                star = True
                continue
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                parts.append(f"**{name}")
                continue
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
                parts.append("*")
                star = True
            parts.append(name + self._default(parameter))
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                positional_only = len(parts)
        if positional_only:
            parts.insert(positional_only, "/")
        return ", ".join(parts)

    @staticmethod
    def _default(parameter: inspect.Parameter) -> str:
        if parameter.default is inspect.Parameter.empty:
            return ""
        if type(parameter.default) in _LITERALS:
            return f"={parameter.default!r}"
        return f"=_default_{parameter.name}"


def _interpreted() -> bool:
    """Is torch.export tracing us in non-strict mode?"""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def _interpret(module: torch.nn.Module, flat: list[torch.Tensor]) -> Any:
    with fx.traceback.preserve_node_meta(), ExitStack() as regions:
        return _Interpreter(module, regions).run(*flat, enable_io_processing=False)


class _Interpreter(fx.Interpreter):
    """Enters autocast regions for what they are: the calls in the graph would only note them while torch.export traces."""

    def __init__(self, module: torch.nn.Module, regions: ExitStack) -> None:
        super().__init__(module)
        self._regions = regions

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is ENTER:
            region = ExitStack()
            region.enter_context(torch.autocast(*args))
            self._regions.push(region)
            return region
        if target is EXIT:
            return args[0].close()
        return super().call_function(target, args, kwargs)
