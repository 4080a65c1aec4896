"""Where in the user's model an error of PyTorch comes from: module path and source line."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_STDLIB = sysconfig.get_path("stdlib")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def blame(error: BaseException, model: nn.Module) -> str:
    """`" in module 'path' (file:line)"` for the place in `model` where `error` arose; "" where nothing is known.

    PyTorch prints the user's frames into its messages (Dynamo) or lets the error rise through them (torch.export).
    """
    links = list(chain(error))
    places = (place(_frames(link.__traceback__), model) for link in links)
    path, line = next(((p, at) for p, at in places if p or at), ("", None))
    printed = (source_in_text(str(link)) for link in links)
    return where(path, next((at for at in printed if at), line))


def where(path: str, line: str | None) -> str:
    """Module path and source line as part of a sentence."""
    return (f" in module '{path}'" if path else "") + (f" ({line})" if line else "")


def place(frames: Iterable[tuple[FrameType, int]], model: nn.Module) -> tuple[str, str | None]:
    """Path of the innermost submodule that runs in `frames` (outermost first), and the last user line inside the model.

    The line is None where no frame belongs to the model or all of its code is torch's own.
    """
    names = {id(module): name for name, module in model.named_modules()}
    path: str | None = None
    line = None
    for frame, number in frames:
        path = names.get(id(frame.f_locals.get("self")), path)
        if path is not None and is_user_file(frame.f_code.co_filename):
            line = f"{frame.f_code.co_filename}:{number}"
    return path or "", line


def source_in_text(text: str) -> str | None:
    """`file:line` of the last stack frame printed in `text` that lies outside the torch package."""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(text) if is_user_file(m["file"])]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else None


def is_user_file(file: str) -> bool:
    """Whether a source file is neither torch's, nor this package's, nor Python's own, nor generated."""
    if file.startswith((_TORCH, _HERE, "<")):
        return False
    return not file.startswith(_STDLIB) or "-packages" in file


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def first_line(error: BaseException) -> str:
    """The class and the first non-empty line of an error's text."""
    return first_lines(error, 1)


def first_lines(error: BaseException, count: int) -> str:
    """The class and the first `count` non-empty lines of an error's text, as one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *([" ".join(lines[:count])] if lines else [])])


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
