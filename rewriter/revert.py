"""`revert`: the plain model back, or some of its streams."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from resfx.applying import reapply
from resfx.patterns import ResfxError
from resfx.rewritten import Rewritten, is_attached
from resfx.selection import SelectionError, Streams


class NotRewritten(ResfxError):
    """A rewritten model was asked for, and this is none."""


def revert(model: nn.Module, *, streams: Streams = None) -> nn.Module:
    """Take a rewrite back.

    Without `streams`: the model that `model` was rewritten from (with `copy=False` the very object, else the copy that
    was made then), with its own class, state_dict names and call, and the values of its tensors as they are now:
    trained, moved or cast. The parameters under `residual.*` are dropped.

    With `streams` (indices, as in `rewrite`): only these become plain. The others stay rewritten, keep their parameters
    (the same objects) and numbers; the result is a new `Rewritten`. Nothing is captured anew.

    Either way the result shares its tensors with `model`, which should not be used any more.
    Errors: NotRewritten; SelectionError for a stream that is not rewritten.
    """
    own = require_rewritten(model, "reverted")
    plans = own.origin.plans
    rewritten = [plan.stream.index for plan in plans]
    wanted = _wanted(streams, rewritten)
    kept = [plan for plan in plans if plan.stream.index not in wanted]
    return reapply(own, kept) if kept else own.origin.model


def require_rewritten(model: nn.Module, verb: str) -> Rewritten:
    """`model`, known to be rewritten. Errors: NotRewritten with what to pass instead."""
    if isinstance(model, Rewritten):
        return model
    if "residual_map" in vars(model):
        raise NotRewritten(
            f"a {type(model).__name__} that was rewritten part by part can't be {verb}: its own forward was never captured. Its"
            " state_dict() holds all of it, for the model that the same rewrite makes of the original"
        )
    if is_attached(model):
        raise NotRewritten(
            f"a {type(model).__name__} that resfx.attach has rewritten can't be {verb}: it is still the original. Its state_dict() holds"
            " all of it; resfx.detach gives the plain model back"
        )
    inside = next((path for path, module in model.named_modules() if isinstance(module, Rewritten)), None)
    hint = f"pass the module it wraps, its `{inside}`" if inside else "pass what resfx.rewrite or resfx.load returned"
    raise NotRewritten(f"a {type(model).__name__} is not rewritten and can't be {verb}: {hint}")


def _wanted(streams: Streams, rewritten: Sequence[int]) -> list[int]:
    if streams is None:
        return list(rewritten)
    wanted = [streams] if isinstance(streams, int) else list(streams)
    if not wanted:
        raise SelectionError("streams=[] reverts nothing; leave it out to revert all of them")
    for index in wanted:
        if index not in rewritten:
            listed = ", ".join(map(str, sorted(rewritten)))
            raise SelectionError(f"stream {index} is not rewritten; the rewritten ones: {listed}")
    return wanted
