"""The finished module: the user's module tree, driven by a graph.

Not an `fx.GraphModule` on purpose: torch.export interprets those directly, dropping forward hooks and the names of
keyword arguments (two masks of one shape would be swapped silently).
"""

from __future__ import annotations

import copy
import itertools
import linecache
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import fx, nn

from resfx.capture_errors import CaptureError
from resfx.devices import follow, moves_of
from resfx.fixed_dtypes import FixedDtypes, fixed_dtypes
from resfx.guards import parameter_dtypes
from resfx.passes.autocast import write_as_blocks

_numbers = itertools.count()

# Key of `GraphModule.meta`: why the graph holds in eval mode only.
TRAIN_REFUSAL = "resfx_train_refusal"


class GraphedModule(nn.Module):
    """An `nn.Module` whose forward is generated from `graph`; call `recompile()` after editing the graph.

    Survives deepcopy, `.to()`, `.train()`/`.eval()`, torch.compile(fullgraph=True) and torch.export.
    """

    _graph: fx.Graph
    _train_refusal: str | None
    _fixed_dtypes: FixedDtypes
    code: str

    def __new__(cls, *args: Any, **kwargs: Any) -> GraphedModule:
        # forward is generated per instance, so every instance gets its own class.
        bases = cls.__bases__ if cls.__dict__.get("_is_instance_class", False) else (cls,)
        own = type(cls.__name__, bases, {"_is_instance_class": True, "__module__": cls.__module__})
        instance: GraphedModule = super().__new__(own)
        return instance

    def __init__(self, module: fx.GraphModule) -> None:
        """Take over the tree and the graph of `module`, which must not be used afterwards."""
        super().__init__()
        for key, value in module.__dict__.items():
            if key in self.__dict__ and isinstance(self.__dict__[key], (dict, set)):
                self.__dict__[key].update(value)
        self.training = module.training
        self.__dict__["_graph"] = module.graph
        self.__dict__["_train_refusal"] = module.meta.get(TRAIN_REFUSAL)
        self.recompile()

    def stand_in_for(self, kind: type[nn.Module]) -> None:
        """Be an instance of `kind` too: its methods and properties, but its forward and what is defined here, are this module's own."""
        own = type(self)
        own.__bases__ = (*own.__bases__, kind)

    @property
    def graph(self) -> fx.Graph:
        return self._graph

    @property
    def trains(self) -> bool:
        """Has the model a train mode? False where it could be captured in eval mode only."""
        return not self._train_refusal

    def train(self, mode: bool = True) -> Self:
        """As `nn.Module.train`; raises CaptureError where the model could be captured in eval mode only."""
        if mode and self._train_refusal:
            raise CaptureError(
                f"this model was captured in eval mode only: {self._train_refusal}."
                " Rewrite a variant whose train mode a graph can hold: layer drop, masks drawn by numpy and decisions on values can"
                " often be switched off by the model's own options."
            )
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `.to`, `.half`, `.cuda` do; nn.Module has no public place for it. Devices in the graph go with the parameters.

        Raises CaptureError, before anything has moved, where the graph holds a dtype that may have followed the parameters'.
        """
        for old in parameter_dtypes(self) & self._fixed_dtypes.keys():
            new = fn(torch.empty(0, dtype=old)).dtype
            if new != old:
                raise CaptureError(
                    f"this model can't become {new}: {self._fixed_dtypes[old]}, was captured with {old} written down, where the"
                    f" original may follow the dtype of its values. Rewrite model.to({new}) instead; the result loads this state_dict."
                )
        moves = moves_of(self, fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if moves:
            follow(self, self._graph, moves)
            self.recompile()
        return self

    def recompile(self) -> None:
        """Generate forward from the graph as it is now."""
        self._graph.owning_module = self  # type: ignore[assignment]
        self.__dict__["_fixed_dtypes"] = fixed_dtypes(self, self._graph)
        write_as_blocks(self._graph)
        python = self._graph.python_code("self")
        name = f"<resfx graph {next(_numbers)}>"
        linecache.cache[name] = (len(python.src), None, python.src.splitlines(True), name)
        namespace = dict(python.globals)
        exec(compile(python.src, name, "exec"), namespace)
        self.__dict__["code"] = python.src
        type(self).forward = namespace["forward"]

    def print_readable(self, print_output: bool = True) -> str:
        """The generated code, with shapes."""
        text = self._graph.python_code("self", verbose=True).src
        if print_output:
            print(text)
        return text

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedModule:
        new = GraphedModule.__new__(type(self))
        memo[id(self)] = new
        for key, value in self.__dict__.items():
            if key != "_graph":
                new.__dict__[key] = copy.deepcopy(value, memo)
        new.__dict__["_graph"] = copy.deepcopy(self._graph, memo)
        new.recompile()
        return new
