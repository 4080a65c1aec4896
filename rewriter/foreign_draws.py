"""Random numbers that are not torch's: a graph would keep the one that was drawn while it was captured."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from torch import nn

from resfx.capture_errors import CaptureError
from resfx.failure import locate

# What draws one number where no size is given, as it is spelled in `random` and `numpy.random`.
_ONE = ("random", "uniform", "rand")


@dataclass(frozen=True, eq=False)
class ForeignDraw:
    """A number between `low` and `high` that nobody may read. A comparison that comes out the same for all of them reads none."""

    low: float
    high: float

    def __lt__(self, other: Any) -> bool:
        return _same_for_all(self.high < other, self.low >= other)

    def __le__(self, other: Any) -> bool:
        return _same_for_all(self.high <= other, self.low > other)

    def __gt__(self, other: Any) -> bool:
        return _same_for_all(self.low > other, self.high <= other)

    def __ge__(self, other: Any) -> bool:
        return _same_for_all(self.low >= other, self.high < other)


def _same_for_all(holds: bool, fails: bool) -> bool:
    return holds if holds or fails else NotImplemented  # Python's TypeError for it names the class


@contextmanager
def refused_draws(model: nn.Module) -> Iterator[None]:
    """Within, the model must not use what Python's or numpy's generator draws; they come back as they were. Errors: CaptureError.

    Both are the global ones: nobody can tell whether a generator of the model's own was used. A number that is drawn and not read
    is none that a graph could keep: a LayerDrop may ask for the mode after its draw.
    """
    numpy: Any = sys.modules.get("numpy")
    unread: list[str] = []
    with kept_generators() as (plain, array):
        try:
            with (
                _unread_draws(random, "Python's `random`", unread),
                _unread_draws(numpy and numpy.random, "`numpy.random`", unread),
            ):
                yield
        except CaptureError as error:
            if ForeignDraw.__name__ in str(error):
                raise _refusal(unread[-1], f"\n  at {locate(error, model)[1]}") from error
            raise
        drawn = _drawn(plain, array, numpy)
    if drawn:
        raise _refusal(drawn)


@contextmanager
def kept_generators() -> Iterator[tuple[Any, Any]]:
    """Afterwards Python's and numpy's generators are as they were: the states given."""
    numpy: Any = sys.modules.get("numpy")
    plain, array = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield plain, array
    finally:
        random.setstate(plain)
        if numpy:
            numpy.random.set_state(array)


@contextmanager
def _unread_draws(owner: Any, name: str, drawn: list[str]) -> Iterator[None]:
    """Let the functions of `owner` that draw one number give a ForeignDraw, and note it; other threads draw as before."""
    thread: int | None = threading.get_ident()

    def unread(draw: Any, function: str, *args: Any, **kwargs: Any) -> Any:
        bounds = args if function == "uniform" and args else (*args, 0.0, 1.0)
        one = len(bounds) == 2 and all(isinstance(bound, int | float) for bound in bounds)
        if kwargs or not one or threading.get_ident() != thread:
            return draw(*args, **kwargs)
        drawn.append(name)
        return ForeignDraw(min(bounds), max(bounds))

    with ExitStack() as stack:
        for function in _ONE:
            draw = getattr(owner, function, None)
            if draw is not None:
                stack.enter_context(mock.patch.object(owner, function, partial(unread, draw, function)))
        try:
            yield
        finally:
            thread = None  # where captures in two threads overlap, the patch of one may stay


def _refusal(drawn: str, at: str = "") -> CaptureError:
    return CaptureError(
        f"the model draws from {drawn}, and a graph would keep the one number that was drawn at capture. Draw with torch (torch.rand),"
        f" pass the number as an argument, or switch the draw off (LayerDrop, augmentation).{at}"
    )


def _drawn(plain: Any, array: Any, numpy: Any) -> str:
    if random.getstate() != plain:
        return "Python's `random`"
    if numpy and not all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), array, strict=True)):
        return "`numpy.random`"
    return ""
