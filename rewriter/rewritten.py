"""The result of a rewrite: a GraphModule on the user's own module tree that is called like the model it came from."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from resfx.passes import Plan
from resfx.patterns import ResfxError, ResidualMap


class EvalOnly(ResfxError):
    """The model was captured in eval mode because it does not trace in train mode."""


class NotOnRewritten(ResfxError):
    """A method that needs the model's own class, such as `generate`."""


@dataclass(frozen=True)
class Origin:
    """What a rewritten model came from: the model (sharing its submodules), and the plans that were applied to it."""

    model: nn.Module
    plans: tuple[Plan, ...]
    eval_only: str | None


# Read from the original model: what trainers and pipelines ask a model for.
_PASSED_THROUGH = frozenset({"config", "device", "dtype"})


class Rewritten(fx.GraphModule):
    """A rewritten model. Same call signature and output types as the original, whose submodules are its own children.

    New parameters live under `residual.<stream>.<site>.<name>`; `residual_map` tells what was found and changed.
    """

    _origin: Origin
    _residual_map: ResidualMap

    @property
    def residual_map(self) -> ResidualMap:
        """What was found, rewritten and refused."""
        return self._residual_map

    @property
    def origin(self) -> Origin:
        """The model it was made from, with its root parameters and buffers as they are here."""
        model = self._origin.model
        model._parameters.update({n: p for n, p in self._parameters.items() if n in model._parameters})
        model._buffers.update({n: b for n, b in self._buffers.items() if n in model._buffers})
        model._modules.update({n: m for n, m in self._modules.items() if n in model._modules})
        return self._origin

    def train(self, mode: bool = True) -> Rewritten:
        """As nn.Module.train. Errors: EvalOnly where the model could be captured in eval mode only."""
        reason = self._origin.eval_only if "_origin" in self.__dict__ else None
        if mode and reason is not None:
            raise EvalOnly(f"this model was rewritten in eval mode and has no train mode: {reason}")
        super().train(mode)
        return self

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Not here: a captured graph has no key-value cache. Errors: NotOnRewritten."""
        raise NotOnRewritten(
            "a rewritten model has no generate(): its graph was captured without a cache. "
            "Use resfx.attach(model, form, args, kwargs), which keeps the model object and its generate()."
        )

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_THROUGH and "_origin" in self.__dict__:
            return getattr(self._origin.model, name)
        return super().__getattr__(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewritten:
        copied = Rewritten(nn.Module(), fx.Graph())
        memo[id(self)] = copied
        for kept in _STATE:
            getattr(copied, kept).update(copy.deepcopy(getattr(self, kept), memo))
        copied.training = self.training
        copied.graph = copy.deepcopy(self.graph, memo)
        copied._origin = replace(self._origin, model=copy.deepcopy(self._origin.model, memo))
        copied._residual_map = self._residual_map  # what was found stays true; its nodes belong to no copy
        return copied


_STATE = (
    "_modules",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def as_rewritten(captured: fx.GraphModule) -> Rewritten:
    """The captured graph (the same nodes) under a module of this class, on the same parameters, buffers and children."""
    result = Rewritten(nn.Module(), fx.Graph())
    for kept in _STATE:
        getattr(result, kept).update(getattr(captured, kept))
    result.training = captured.training
    result.graph = captured.graph
    return result
