"""Which code of a model fixes a size that was asked to be dynamic.

torch.export says which size is fixed, but not where. The module that decides logs each decision while the frames of the
model are still on the stack: a handler on that log reads them. Where a release of torch logs otherwise, the place stays
unknown.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

import torch
from torch import nn

from resfx.export.blame import place, where
from resfx.export.call import Call
from resfx.export.quiet import quiet_failure
from resfx.export.run import FlatModule, preserved_buffers
from resfx.export.sizes import Spec, asks, open_all

_LOGGER = "torch.fx.experimental.symbolic_shapes"
_CREATED = re.compile(
    r"create_symbol (?P<symbol>s\d+) = \d+ for L\['tensors'\]\[(?P<input>\d+)\]\.size\(\)\[(?P<dim>\d+)\]"
)
_FIXED = re.compile(r"set_replacement (?P<symbol>s\d+) = (?P<size>\d+) ")


def fixed_sizes(model: nn.Module, call: Call, spec: Sequence[Spec]) -> list[str]:
    """One text for each size that `spec` (one entry a tensor) asks for and the model fixes: which, to what, where."""
    watch = _Watch(model)
    with _listening(watch), suppress(Exception), preserved_buffers(model), torch.no_grad():
        # Only the log matters here: the export that failed has been reported already.
        shapes = {"tensors": open_all(call.tensors)}
        with quiet_failure():
            torch.export.export(FlatModule(model, call), call.tensors, dynamic_shapes=shapes, strict=False)
    asked = [found for found in watch.found if _asked(spec[found[0]], found[1])]
    return [f"{call.names[i]} dim {dim} is {size}{at}" for i, dim, size, at in asked]


def _asked(spec: Spec, dim: int) -> bool:
    if not spec:
        return False
    return asks(spec.get(dim) if isinstance(spec, dict) else spec[dim])


class _Watch(logging.Handler):
    """Collects (input, dim, size, place) for every input size that becomes a constant."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: list[tuple[int, int, int, str]] = []
        self._model = model
        self._sources: dict[str, tuple[int, int]] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if created := _CREATED.search(text):
            self._sources[created["symbol"]] = int(created["input"]), int(created["dim"])
        fixed = _FIXED.search(text)
        if fixed is None or fixed["symbol"] not in self._sources:
            return
        stack = reversed(list(_callers(sys._getframe())))
        self.found.append((*self._sources[fixed["symbol"]], int(fixed["size"]), where(*place(stack, self._model))))


@contextmanager
def _listening(watch: _Watch) -> Iterator[None]:
    """`watch` as the only handler of the logger, at the level of its decisions."""
    logger = logging.getLogger(_LOGGER)
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [watch], False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])


def _callers(frame: FrameType | None) -> Iterator[tuple[FrameType, int]]:
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back
