"""The errors that lowering a model can raise. All are subclasses of `ResfxError`; the cause is chained."""

from __future__ import annotations

from resfx.patterns.errors import ResfxError


class ExportError(ResfxError):
    """Base of all errors of `resfx.export`."""


class NotAModuleError(ExportError, TypeError):
    """What was passed as the model is no `nn.Module`."""


class InputError(ExportError, TypeError):
    """Arguments do not fit the model's forward or its package, or hold a value that no exporter can take."""


class OutputError(ExportError, TypeError):
    """The model returns nothing that a graph can return."""


class OutputPathError(ExportError, OSError):
    """The output path cannot be written: no such parent, a folder, no permission, a wrong ending."""


class TraceError(ExportError):
    """torch.export could not trace the model."""


class DynamicDimError(TraceError):
    """A dimension the user asked to be dynamic is fixed by the model, or the request does not fit the arguments."""


class CompileError(ExportError):
    """torch.compile stopped at a graph break, an unsupported operation or inside its backend."""


class AotiError(ExportError):
    """AOTInductor could not compile, package, load or run the model."""


class OnnxExportError(ExportError):
    """torch.export passed, but the exporter could not turn the graph into ONNX."""


class OnnxRunError(ExportError):
    """The ONNX file does not pass onnx.checker, or ONNX Runtime cannot load or run it."""


class UnsupportedDtypeError(ExportError):
    """The model or its inputs have a dtype that ONNX Runtime's CPU provider cannot run."""


class OutputMismatchError(ExportError):
    """A lowered model returns other numbers than the model itself.

    `output`: name of the first output that differs. `index`: where it differs most, empty for a scalar.
    """

    def __init__(self, message: str, *, output: str, index: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.output = output
        self.index = index
