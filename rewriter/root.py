"""A GraphModule on the user's own module tree."""

from __future__ import annotations

import torch
from torch import fx, nn


def graft(model: nn.Module, graph: fx.Graph | None = None) -> fx.GraphModule:
    """A GraphModule whose children, parameters and buffers are the very objects of `model`, never-called ones too.

    Class attributes and other instance attributes are not taken over.
    """
    module = fx.GraphModule(nn.Module(), fx.Graph())
    module._modules.update(model._modules)
    module._parameters.update(model._parameters)
    module._buffers.update(model._buffers)
    module._non_persistent_buffers_set.update(model._non_persistent_buffers_set)
    module._state_dict_hooks.update(model._state_dict_hooks)
    module._load_state_dict_pre_hooks.update(model._load_state_dict_pre_hooks)
    module.training = model.training
    if graph is not None:
        module.graph = graph
    return module


def add_constant(module: nn.Module, name: str, value: torch.Tensor) -> str:
    """Register `value` as a non-persistent buffer under a free name like `name`; returns that name."""
    free = free_name(module, name.replace(".", "_"))
    module.register_buffer(free, value, persistent=False)
    return free


def free_name(module: nn.Module, name: str) -> str:
    """`name`, or `name_1`, ... whichever no attribute of `module` has."""
    if not hasattr(module, name):
        return name
    number = 1
    while hasattr(module, f"{name}_{number}"):
        number += 1
    return f"{name}_{number}"
