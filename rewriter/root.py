"""A GraphModule on the user's own module tree."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

# Key of `GraphModule.meta`: the names of the model that GraphModule has itself, and what they are in the graft.
_ALIASES = "resfx_aliases"


class Graft(fx.GraphModule):
    """A GraphModule that generates its code when it is called.

    Between capture and result a graph is edited a dozen times and run once or never: code for each edit took most of the time.
    """

    def recompile(self) -> Any:
        """The next call, or a look at `code`, generates the code anew."""
        type(self).forward = Graft.forward  # type: ignore[method-assign]  # every GraphModule has a class of its own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        super().recompile()
        return self.forward(*args, **kwargs)

    @property
    def code(self) -> str:
        super().recompile()
        return super().code


def graft(model: nn.Module, graph: fx.Graph | None = None) -> fx.GraphModule:
    """A GraphModule whose children, parameters and buffers are the very objects of `model`, never-called ones too.

    Class attributes and other instance attributes are not taken over. `graph_target` tells what a name is in the graph:
    one that GraphModule has itself (`graph`, `code`, `meta`) is another there.
    """
    module = Graft(nn.Module(), fx.Graph())
    names = [*model._modules, *model._parameters, *model._buffers]
    aliases = {name: f"_user_{name}" for name in names if hasattr(module, name)}
    module._modules.update({aliases.get(name, name): child for name, child in model._modules.items()})
    module._parameters.update({aliases.get(name, name): value for name, value in model._parameters.items()})
    module._buffers.update({aliases.get(name, name): value for name, value in model._buffers.items()})
    if aliases:
        module.meta[_ALIASES] = aliases
    module._non_persistent_buffers_set.update(model._non_persistent_buffers_set)
    module._state_dict_hooks.update(model._state_dict_hooks)
    module._load_state_dict_pre_hooks.update(model._load_state_dict_pre_hooks)
    module.training = model.training
    if graph is not None:
        module.graph = graph
    return module


def graph_target(module: fx.GraphModule, name: str) -> str:
    """What the parameter, buffer or submodule `name` of the model is called in the graft `module`."""
    first, dot, rest = name.partition(".")
    aliases: dict[str, str] = module.meta.get(_ALIASES, {})
    return f"{aliases.get(first, first)}{dot}{rest}"


def add_constant(module: nn.Module, name: str, value: torch.Tensor) -> str:
    """Register `value` as a non-persistent buffer under a free name like `name`; returns that name."""
    free = free_name(module, name.replace(".", "_"))
    module.register_buffer(free, value, persistent=False)
    return free


def take_over(module: nn.Module, owner: nn.Module, target: str, name: str) -> str:
    """Let `module` have what `target` names in `owner` (a subgraph, a constant), under a free name like `name`; returns that name."""
    free = free_name(module, name.replace(".", "_"))
    setattr(module, free, operator.attrgetter(target)(owner))
    return free


def free_name(module: nn.Module, name: str) -> str:
    """`name`, or `name_1`, ... whichever no attribute of `module` has."""
    if not hasattr(module, name):
        return name
    number = 1
    while hasattr(module, f"{name}_{number}"):
        number += 1
    return f"{name}_{number}"
