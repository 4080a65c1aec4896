"""Turns what a capture route threw into one message: route, module path, source line, what to try."""

from __future__ import annotations

import importlib.util
import os
import re
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch
from torch import nn

from resfx.capture_errors import CaptureError

_TORCH = os.path.dirname(torch.__file__) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_DEMO = _HERE + "demo.py"  # the built-in example is a model like any user's
_NUMPY = importlib.util.find_spec("numpy")
_SKIPPED = (
    _TORCH,
    os.path.dirname(os.__file__) + os.sep + "contextlib",
    *((os.path.dirname(_NUMPY.origin) + os.sep,) if _NUMPY and _NUMPY.origin else ()),
)

_DATA_DEPENDENT = (
    "GuardOnDataDependentSymNode",
    "data-dependent",
    "Data-dependent",
    "data dependent",
    "DataDependentOutputException",
    "traced variables cannot be used as inputs to control flow",
    "symbolically traced variables",
)


def is_data_dependent(error: BaseException) -> bool:
    """Did the capture stop at Python control flow on tensor values?"""
    return any(any(word in f"{type(link).__name__}: {link}" for word in _DATA_DEPENDENT) for link in _chain(error))


def is_unknown_output(error: BaseException) -> bool:
    return any("output" in str(link).lower() and _names_type_problem(str(link)) for link in _chain(error))


def _names_type_problem(text: str) -> bool:
    return "unsupported" in text.lower() or "pytree" in text.lower() or "register_dataclass" in text


def without_own_frames(stack_trace: str) -> str:
    """A node's stack trace without the frames of this package."""
    entries = re.split(r"(?m)^(?=\s*File \")", stack_trace)
    return "".join(entry for entry in entries if f'File "{_HERE}' not in entry or f'File "{_DEMO}' in entry)


def is_machinery(file: str) -> bool:
    """Does the file belong to torch, to numpy, to contextlib or to this package, rather than to a model?"""
    return file.startswith(_SKIPPED) or (file.startswith(_HERE) and file != _DEMO)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or link.__context__


def forget(handled: BaseException | None, error: BaseException) -> None:
    """`handled` was being handled when the work that `error` ended began: it is no reason of `error`."""
    for link in list(_chain(error)):
        if link.__context__ is handled:
            link.__context__ = None


def _frames(tb: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while tb is not None:
        yield tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next


def locate(error: BaseException, model: nn.Module) -> tuple[str | None, str | None]:
    """(module path, `file:line: code`) of the innermost frame outside torch, from the first link that has one."""
    paths = {id(module): path for path, module in model.named_modules()}
    for link in _chain(error):
        path, source = None, None
        for frame, line in _frames(link.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in paths:
                path = paths[id(owner)]
            name = frame.f_code.co_filename
            if path is None or is_machinery(name) or name.startswith("<"):
                continue
            code = traceback.extract_tb(link.__traceback__)
            text = next((f.line for f in code if f.filename == name and f.lineno == line), "")
            source = f"{name}:{line}: {text}"
        if source is not None:
            return path, source
    return None, None


def failing_module(error: BaseException, model: nn.Module) -> str | None:
    """The path of the module whose own code was running when `error` was raised: torch's own layers don't count."""
    paths = {id(module): path for path, module in model.named_modules()}
    found = None
    for frame, _ in _frames(error.__traceback__):
        owner = frame.f_locals.get("self")
        if not is_machinery(frame.f_code.co_filename) and isinstance(owner, nn.Module):
            found = paths.get(id(owner), found)
    return found


def capture_failure(error: BaseException, model: nn.Module, route: str) -> CaptureError:
    """The CaptureError for `error`; raise it `from error`."""
    held = _module_of_script_object(model) if "__obj_flatten__" in str(error) else None
    if held is not None:
        return CaptureError(
            f"the {route} route failed in module `{held}`: it keeps its weights in a script object, as torch.ao.quantization does,"
            " and torch.export reads none. Rewrite first and quantise the result, whose linear layers are the model's own, or"
            " quantise with torchao."
        )
    return CaptureError(f"the {route} route failed{_told(error, model)}\n  {_remedy(error, route)}")


def example_failure(error: BaseException, model: nn.Module) -> CaptureError:
    """The CaptureError for a model that does not run on the example inputs, captured or not; raise it `from error`."""
    return CaptureError(
        f"the model itself fails on the example inputs{_told(error, model)}\n"
        "  Check that they have the dtypes, devices and sizes that the model takes."
    )


def captured_failure(error: BaseException, graph_module: nn.Module) -> CaptureError:
    """The CaptureError for a captured graph that fails where the model ran; raise it `from error`."""
    return CaptureError(
        f"the captured graph fails on the example inputs, on which the model runs{_told(error, graph_module)}\n"
        "  The model may take another way while it is exported, or keep state outside its parameters: pass frontend='fx', or"
        " rewrite the submodule that holds the stream."
    )


def call_failure(error: BaseException, model: nn.Module) -> str:
    """What to say where the model itself fails on a call."""
    return f"the model itself fails on this call{_told(error, model)}"


def _told(error: BaseException, model: nn.Module) -> str:
    """Module, kind, first line and source line of `error`."""
    path, source = locate(error, model)
    where = f" in module `{path or type(model).__name__}`" if path is not None else ""
    at = f"\n  at {source}" if source else ""
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{where}: {type(error).__name__}: {reason[:400]}{at}"


def _module_of_script_object(model: nn.Module) -> str | None:
    """The first module that holds an object of TorchScript: its numbers are no Parameters, and no graph can hold it."""
    for path, module in model.named_modules():
        if any(isinstance(value, torch.ScriptObject) for value in vars(module).values()):
            return str(path)
    return None


def _remedy(error: BaseException, route: str) -> str:
    if is_data_dependent(error):
        return (
            "This is Python control flow on a tensor's values, or an assert on them: use torch.cond there, leave the"
            " assert out, pass the decision as an argument, or rewrite the submodule that holds the stream."
        )
    if is_unknown_output(error):
        return (
            "The model returns a container that torch cannot take apart. Switch it off by its keyword (for example"
            " use_cache=False), or register it with torch.export.register_dataclass."
        )
    if isinstance(error, TypeError) and "argument" in str(error):
        return "Check args and kwargs: they must be what the model's forward takes."
    other = "fx" if route != "fx" else "export"
    return f"Check that the model runs on these inputs; if it does, try the frontend {other!r}."
