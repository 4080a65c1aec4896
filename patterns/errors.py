"""The errors a user can meet. `ResfxError` is the one base class; every package raises subclasses of it.

Each message names the module path, the source line where known, and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from resfx.patterns.rejected import Rejected


class ResfxError(Exception):
    """Base of every error resfx raises on purpose; the cause, where there is one, is chained."""


class NoResidualFound(ResfxError):
    """No site, or none that was asked for. `rejected` lists the sums that came near, with the reason for each."""

    def __init__(self, message: str, rejected: list[Rejected]) -> None:
        super().__init__(message)
        self.rejected = rejected


class UnknownPlace(ResfxError):
    """`explain` was asked about a place that is no module, source file or sum of the model."""


class SumDiffers(ResfxError):
    """A residual sum has other terms in train mode than in eval mode, and the two can't be told apart by the update alone."""
