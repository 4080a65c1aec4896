"""The result of a rewrite: the user's module tree, run by the rewritten graph, called like the model it came from."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

from torch import fx, nn

from resfx.graphed import GraphedModule
from resfx.loops import set_loops
from resfx.passes import Plan
from resfx.passes.parameters import ParameterTree
from resfx.patterns import ResfxError, ResidualMap

if TYPE_CHECKING:
    from resfx.applying import Untouched


class NotOnRewritten(ResfxError):
    """What needs the model's own class, such as `generate` and pickling."""


@dataclass(frozen=True)
class Origin:
    """What a rewritten model came from: the model (sharing its submodules), the plans that were applied to it, and the
    capture before they were."""

    model: nn.Module
    plans: tuple[Plan, ...]
    untouched: Untouched


# Read from the original model: what trainers and pipelines ask a model for.
_PASSED_THROUGH = frozenset({"config", "device", "dtype"})
_OWN = ("_origin", "_residual_map")


def taken_names(model: nn.Module) -> list[str]:
    """Submodules, parameters and buffers at the root of `model` whose names a rewritten model needs itself."""
    blank = fx.GraphModule(nn.Module(), fx.Graph())
    own = {*dir(Rewritten), *dir(blank), *_OWN, "_train_refusal", "_fixed_dtypes"} - set(dir(nn.Module()))
    return [name for name in (*model._modules, *model._parameters, *model._buffers) if name in own]


def is_attached(model: nn.Module) -> bool:
    """Whether `resfx.attach` put its new parameters on `model`. What was rewritten part by part has a map beside them."""
    has_parameters = isinstance(model._modules.get("residual"), ParameterTree)
    return has_parameters and not isinstance(model, Rewritten) and "residual_map" not in vars(model)


class Rewritten(GraphedModule):
    """A rewritten model. Same call signature and output types as the original, whose submodules are its own children.

    New parameters live under `residual.<stream>.<site>.<name>`; `residual_map` tells what was found and changed.
    """

    _origin: Origin
    _residual_map: ResidualMap

    def __init__(self, module: fx.GraphModule, origin: Origin, residual_map: ResidualMap) -> None:
        super().__init__(module)
        self.__dict__["_origin"] = origin
        self.__dict__["_residual_map"] = residual_map

    @property
    def residual_map(self) -> ResidualMap:
        """What was found, rewritten and refused."""
        return self._residual_map

    @property
    def origin(self) -> Origin:
        """The model it was made from, with its root parameters, buffers and training flag as they are here."""
        model = self._origin.model
        model._parameters.update({name: self._parameters[name] for name in model._parameters})
        model._buffers.update({name: self._buffers[name] for name in model._buffers})
        model._modules.update({name: self._modules[name] for name in model._modules})
        model.training = self.training
        return self._origin

    def train(self, mode: bool = True) -> Self:
        """As the original's `train`, its own override included (a part that stays frozen in eval mode)."""
        super().train(mode)
        model = self._origin.model
        if type(model).train is not nn.Module.train or "train" in vars(model):
            self.origin.model.train(mode)  # sets the flags of the submodules, which are shared
            self.training = model.training
        return self

    def set_loops(self, stream: int, loops: int) -> None:
        """Run `stream` (rewritten into `ScaledLoop(loops=..)`) `loops` times from now on; e follows. No new capture.

        Errors: LoopError for a stream without loops, FormError where loops < 1.
        """
        set_loops(self, stream, loops)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Not here: a captured graph has no key-value cache. Errors: NotOnRewritten."""
        raise NotOnRewritten(
            "a rewritten model has no generate(): its graph was captured without a cache. resfx.attach(model, form, args) rewrites"
            " the original model in place, cache and generate() included; this model's state_dict() fits it."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Not here: the class is generated for this one model. Errors: NotOnRewritten."""
        raise NotOnRewritten(
            "a rewritten model can't be pickled: its forward is generated. Write it with resfx.save and read it with"
            " resfx.load, save its state_dict(), or copy it with copy.deepcopy"
        )

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_THROUGH and "_origin" in self.__dict__:
            return getattr(self._origin.model, name)
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            kind = type(self._origin.model) if "_origin" in self.__dict__ else nn.Module
            if not hasattr(kind, name):
                raise
            raise AttributeError(
                f"a rewritten model has no {name}: it is {kind.__name__}'s own, and this one holds no more of it than its forward."
                f" resfx.attach(model, form, args) rewrites the {kind.__name__} in place, all of its methods included"
            ) from error

    def __deepcopy__(self, memo: dict[int, Any]) -> Rewritten:
        own = {name: self.__dict__.pop(name) for name in _OWN}  # they hold nodes of a graph, which can't be copied
        try:
            copied = super().__deepcopy__(memo)
        finally:
            self.__dict__.update(own)
        model = copy.deepcopy(self._origin.model, memo)
        copied.__dict__.update(_origin=replace(self._origin, model=model), _residual_map=self._residual_map)
        assert isinstance(copied, Rewritten)
        return copied
