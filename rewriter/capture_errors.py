"""What can go wrong between the user's module and its graph, as classes."""

from __future__ import annotations

from resfx.patterns.errors import ResfxError


class CaptureError(ResfxError):
    """A capture route failed; the message says which, where in the model's source, and what to try."""


class NotAModule(CaptureError):
    """The thing to capture is no `torch.nn.Module`."""


class DynamicDimSpecialized(CaptureError):
    """A dimension that was asked to be dynamic is fixed by the model itself."""


class GuardError(ResfxError):
    """A captured model was called with something the capture did not cover."""
