"""The errors a user can meet. `ResfxError` is the one base class; every package raises subclasses of it.

Each message names the module path, the source line where known, and what to do.
"""

from __future__ import annotations


class ResfxError(Exception):
    """Base of every error resfx raises on purpose; the cause, where there is one, is chained."""
