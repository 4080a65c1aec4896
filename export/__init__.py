"""Lower any `nn.Module`: by Inductor (`compile`, `to_aoti`) or to ONNX (`to_onnx`), checked against the model itself.

Knows nothing of residual forms. Every error is a subclass of `ResfxError`.
"""

from resfx.export.aoti import AotiReport, load_aoti, to_aoti
from resfx.export.compare import Difference
from resfx.export.errors import (
    AotiError,
    CompileError,
    DynamicDimError,
    ExportError,
    InputError,
    NotAModuleError,
    OnnxExportError,
    OnnxRunError,
    OutputError,
    OutputMismatchError,
    OutputPathError,
    TraceError,
    UnsupportedDtypeError,
)
from resfx.export.inductor import compile
from resfx.export.onnx_calls import register_calls
from resfx.export.onnx_export import to_onnx
from resfx.export.onnx_functions import register_function
from resfx.export.onnx_report import Check, OnnxReport, Port

__all__ = [
    "AotiError",
    "AotiReport",
    "Check",
    "CompileError",
    "Difference",
    "DynamicDimError",
    "ExportError",
    "InputError",
    "NotAModuleError",
    "OnnxExportError",
    "OnnxReport",
    "OnnxRunError",
    "OutputError",
    "OutputMismatchError",
    "OutputPathError",
    "Port",
    "TraceError",
    "UnsupportedDtypeError",
    "compile",
    "load_aoti",
    "register_calls",
    "register_function",
    "to_aoti",
    "to_onnx",
]
