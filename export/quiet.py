"""Silence around a call of PyTorch that may fail: its error says it all."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quiet_failure() -> Iterator[None]:
    """Hold back what is printed and logged, and drop it where the body raises: torch logs a traceback, then raises the same.

    What is printed in a body that succeeds appears after it. Who asks torch for its logs (TORCH_LOGS) gets all of it.
    """
    if "TORCH_LOGS" in os.environ:
        yield
        return
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        yield
    sys.stdout.write(out.getvalue())
    sys.stderr.write(err.getvalue())
