"""Random numbers that are not torch's: a graph would keep the one that was drawn while it was captured."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from resfx.capture_errors import CaptureError


@contextmanager
def refused_draws() -> Iterator[None]:
    """Within, the model must not draw from Python's or numpy's generator, which come back as they were. Errors: CaptureError.

    Both are the global ones: nobody can tell whether a generator of the model's own was used.
    """
    numpy: Any = sys.modules.get("numpy")
    plain, array = random.getstate(), numpy and numpy.random.get_state()
    try:
        yield
        drawn = _drawn(plain, array, numpy)
    finally:
        random.setstate(plain)
        if numpy:
            numpy.random.set_state(array)
    if drawn:
        raise CaptureError(
            f"the model draws from {drawn}, and a graph would keep the one number that was drawn at capture. Draw with torch (torch.rand),"
            " pass the number as an argument, or switch the draw off (LayerDrop, augmentation)."
        )


def _drawn(plain: Any, array: Any, numpy: Any) -> str:
    if random.getstate() != plain:
        return "Python's `random`"
    if numpy and not all(numpy.array_equal(a, b) for a, b in zip(numpy.random.get_state(), array, strict=True)):
        return "`numpy.random`"
    return ""
