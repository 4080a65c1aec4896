"""Where in the user's model an error of PyTorch comes from: module path and source line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def source_in_text(text: str) -> str | None:
    """`file:line` of the last stack frame printed in `text` that lies outside the torch package."""
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(text) if _is_user_file(m["file"])]
    return f"{frames[-1][0]}:{frames[-1][1]}" if frames else None


def blame(error: BaseException, model: nn.Module) -> str:
    """`" in module 'path' (file:line)"` for the place in `model` where `error` arose; "" where nothing is known.

    PyTorch prints the user's frames into its messages (Dynamo) or lets the error rise through them (torch.export).
    """
    path, line = _deepest_module(error, model)
    for link in chain(error):
        line = source_in_text(str(link)) or line
        if line is not None:
            break
    where = f" in module '{path}'" if path else ""
    return where + (f" ({line})" if line else "")


def first_line(error: BaseException) -> str:
    """The class and the first non-empty line of an error's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _is_user_file(file: str) -> bool:
    return not file.startswith((_TORCH, _HERE, "<"))


def _deepest_module(error: BaseException, model: nn.Module) -> tuple[str, str | None]:
    """Module path and source line of the deepest frame that runs a submodule's own code, over the whole chain."""
    names = {id(module): name for name, module in model.named_modules()}
    path, line = "", None
    for link in chain(error):
        for frame, number in _frames(link.__traceback__):
            owner = names.get(id(frame.f_locals.get("self")))
            if owner is None:
                continue
            path = owner
            if _is_user_file(frame.f_code.co_filename):
                line = f"{frame.f_code.co_filename}:{number}"
        if path or line:
            break
    return path, line


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next
