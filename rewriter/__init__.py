"""resfx: find the residual connections of any PyTorch model and rewrite them into a better residual form.

    model2 = resfx.rewrite(model, resfx.DeltaAttention(), (x,))

Every form of `resfx.passes` is an attribute here: `resfx.DeltaAttention`, `resfx.Review`, ...
"""

from __future__ import annotations

from typing import Any

from resfx import export, passes, patterns
from resfx.applying import RewriteError
from resfx.capture import CaptureError, DynamicDimSpecialized, GuardError, NotAModule
from resfx.checkpoint import load, save
from resfx.checkpoint_files import CheckpointError, CheckpointPathError
from resfx.find import find
from resfx.libraries import ONNX_FUNCTIONS
from resfx.live import attach, detach
from resfx.live_known import LiveError
from resfx.loops import LoopError
from resfx.measure import MeasureError, measure
from resfx.measure_report import Report, SiteReading
from resfx.passes import CheckError, EditError, Form, FormError
from resfx.passes.onnx_ops import NAMED
from resfx.patterns import NoResidualFound, ResfxError, ResidualMap, Site, Stream
from resfx.patterns.errors import UnknownPlace
from resfx.published import PublishedNameError, published_to_residual, residual_to_published
from resfx.report_plot import PlotError
from resfx.revert import NotRewritten, revert
from resfx.rewrite import rewrite
from resfx.rewritten import NotOnRewritten, Rewritten
from resfx.selection import SelectionError
from resfx.sharding import shard_units
from resfx.training import TrainingError, parameter_groups

__all__ = [
    "CaptureError",
    "CheckError",
    "CheckpointError",
    "CheckpointPathError",
    "DynamicDimSpecialized",
    "EditError",
    "Form",
    "FormError",
    "GuardError",
    "LiveError",
    "LoopError",
    "MeasureError",
    "NoResidualFound",
    "NotAModule",
    "NotOnRewritten",
    "NotRewritten",
    "PlotError",
    "PublishedNameError",
    "Report",
    "ResfxError",
    "ResidualMap",
    "RewriteError",
    "Rewritten",
    "SelectionError",
    "Site",
    "SiteReading",
    "Stream",
    "TrainingError",
    "UnknownPlace",
    "attach",
    "detach",
    "export",
    "find",
    "load",
    "measure",
    "parameter_groups",
    "passes",
    "patterns",
    "published_to_residual",
    "residual_to_published",
    "revert",
    "rewrite",
    "save",
    "shard_units",
]

for _name, _function in ONNX_FUNCTIONS.items():
    export.register_function(_name, _function)
export.register_calls(NAMED)


def __getattr__(name: str) -> Any:
    """The residual forms, by their class names."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(passes, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*__all__, *(form.__name__ for form in passes.FORMS.values())})
