"""Whole stack traces in the captured graph: the line that really adds, also inside a free function or a torch.cond branch.

torch.export keeps only frames of functions called "forward", and inside a torch.cond branch only lines of generated code. Both
come from one method of the tracer, which is private in its name and documented as the place to change this.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Iterator
from types import FrameType
from unittest import mock

import torch
from torch import fx

from resfx.failure import is_machinery

_LAYERS = os.path.join(os.path.dirname(torch.__file__), "nn", "modules") + os.sep
_GENERATED = "<eval_with_key>"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@contextlib.contextmanager
def whole_stack_traces() -> Iterator[None]:
    """While this is active every traced node keeps all frames of the model's own code."""
    with mock.patch.object(fx.proxy.TracerBase, "_filter_traceback_frames", _model_frames):
        yield


def _model_frames(_tracer: fx.proxy.TracerBase, summary: traceback.StackSummary) -> traceback.StackSummary:
    """The frames below the first `forward` that are not torch's own; lines of generated code replaced by what they came from.

    A model of torch's own, such as nn.TransformerEncoder, has no others: then the lines of its layers are kept.
    """
    first = next((i for i, frame in enumerate(summary) if frame.name == "forward"), len(summary))
    kept = [f for f in summary[first:] if not is_machinery(f.filename)]
    if not kept:
        kept = [f for f in summary[first:] if f.filename.startswith(_LAYERS) and not f.filename.endswith("module.py")]
    if any(f.filename.startswith(_GENERATED) for f in kept):
        live = _live_frames()
        kept = [original for f in kept for original in _originals(f, live)]
    return traceback.StackSummary.from_list(kept)


def _live_frames() -> dict[str, FrameType]:
    """The running frames of generated code, by file name."""
    found: dict[str, FrameType] = {}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_GENERATED):
            found.setdefault(frame.f_code.co_filename, frame)
        frame = frame.f_back
    return found


def _originals(frame: traceback.FrameSummary, live: dict[str, FrameType]) -> list[traceback.FrameSummary]:
    """The model's own lines behind a line of generated code; none where the generated module does not tell."""
    if not frame.filename.startswith(_GENERATED):
        return [frame]
    running = live.get(frame.filename)
    module = None if running is None else running.f_locals.get("self")
    trace = _trace_of_line(module, frame.lineno or 0) if isinstance(module, fx.GraphModule) else None
    return [traceback.FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(trace or "")]


def _trace_of_line(module: fx.GraphModule, line: int) -> str | None:
    """The stack trace of the node that line `line` of the module's code was generated from.

    Private: GraphModule keeps the map from its lines to its nodes in `_lineno_map`, counted from `_prologue_start`.
    """
    lines = getattr(module, "_lineno_map", None) or {}
    index = lines.get(line - getattr(module, "_prologue_start", 0))
    nodes = list(module.graph.nodes)
    return nodes[index].stack_trace if index is not None and index < len(nodes) else None
