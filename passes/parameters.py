"""The parameters a form adds: their names, their start, where they live.

`ModuleParameters` keeps them on the graph module under `residual.<stream>.<owner>.<name>`. The live mode has them as
graph inputs instead and brings its own `Parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.fx import GraphModule, Node

from resfx.passes.editor import Editor
from resfx.passes.errors import EditError
from resfx.patterns.streams import Site


@dataclass(frozen=True)
class ParameterSpec:
    """Shape and start of a parameter: every entry `fill`, or drawn from N(0, std) where std > 0."""

    shape: tuple[int, ...]
    fill: float = 0.0
    std: float = 0.0

    def start(self, value: torch.Tensor) -> None:
        """Fill `value` in place."""
        if self.std > 0:
            nn.init.normal_(value, self.fill, self.std)
        else:
            nn.init.constant_(value, self.fill)


class Parameters(Protocol):
    """Where the parameters of a rewrite come from."""

    def node(self, editor: Editor, name: str, spec: ParameterSpec, site: Site) -> Node:
        """The graph value of parameter `name`; device and dtype are those of the branch of `site`."""


class ParameterTree(nn.Module):
    """Holds parameters by name; the numbers in a name are child trees. It has nothing to run.

    A container that runs all of its children (nn.Sequential, in the live mode) gets back what it hands in.
    """

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[str, ParameterSpec] = {}

    def add(self, name: str, spec: ParameterSpec, device: torch.device, dtype: torch.dtype) -> None:
        """A new parameter at its start."""
        value = torch.empty(spec.shape, device=device, dtype=dtype)
        spec.start(value)
        self.register_parameter(name, nn.Parameter(value))
        self._specs[name] = spec

    def reset_parameters(self) -> None:
        """Give the tree's own parameters their start again, as torch's layers do: for what `to_empty` left without numbers."""
        for name, spec in self._specs.items():
            spec.start(self.get_parameter(name))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """The identity."""
        return value


def subtree(module: nn.Module, path: str, name: str) -> ParameterTree:
    """The tree at `path`, made where it doesn't exist yet. Errors: EditError, saying that `name` can't be added."""
    for folder in path.split("."):
        if not hasattr(module, folder):
            module.add_module(folder, ParameterTree())
        module = getattr(module, folder)
        if not isinstance(module, ParameterTree):
            raise EditError(f"{name} can't be added: the model has a {folder!r} of its own; rename that attribute")
    assert isinstance(module, ParameterTree)
    return module


class ModuleParameters:
    """Parameters of the graph module itself, made at their first use."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph_module = graph_module
        self._made: set[str] = set()
        named = graph_module.named_parameters(remove_duplicate=False)
        floating = [(name, value) for name, value in named if value.is_floating_point()]
        self._own = {name: (number, value) for number, (name, value) in enumerate(floating)}

    def node(self, editor: Editor, name: str, spec: ParameterSpec, site: Site) -> Node:
        """A get_attr of the parameter. Errors: EditError where the name is taken."""
        if name not in self._made:
            self._create(name, spec, site)
            self._made.add(name)
        return editor.attribute(name, self.graph_module.get_parameter(name))

    def _create(self, name: str, spec: ParameterSpec, site: Site) -> None:
        device, dtype = self._place_of(site)
        folder, _, leaf = name.rpartition(".")
        module = subtree(self.graph_module, folder, name)
        if hasattr(module, leaf):
            raise EditError(f"the model already has {name}; revert the earlier rewrite or choose another stream")
        module.add(leaf, spec, device, dtype)

    def _place_of(self, site: Site) -> tuple[torch.device, torch.dtype]:
        """Device and dtype of the first floating Parameter the branch uses, else of the state."""
        used = [self._own[name] for name in site.params if name in self._own]
        like = min(used, key=lambda numbered: numbered[0])[1] if used else site.result.meta["val"]
        return like.device, like.dtype
