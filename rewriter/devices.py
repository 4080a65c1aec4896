"""Devices that a capture wrote down (`arange(n, device=cpu)`) follow the model when it moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from resfx.fixed_dtypes import inner_graphs
from resfx.passes.autocast import ENTER

Moves = Mapping[torch.device, torch.device]


def moves_of(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> dict[torch.device, torch.device]:
    """Old device -> new one, for those of the module's tensors that `fn` (what `.to` applies) takes elsewhere."""
    old = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    moves = {device: fn(torch.empty(0, device=device)).device for device in old}
    return {before: after for before, after in moves.items() if after != before}


def follow(module: nn.Module, graph: fx.Graph, moves: Moves) -> None:
    """Move the devices in `graph`, and in graphs that it calls, and the example values with them. `graph` is to be recompiled."""
    _move(graph, moves)
    for inner in inner_graphs(module, graph):
        _move(inner.graph, moves)
        inner.recompile()


def _move(graph: fx.Graph, moves: Moves) -> None:
    def device(value: torch.device) -> torch.device:
        return next((new for old, new in moves.items() if _names(value, old)), value)

    for node in graph.nodes:
        for value in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, torch.device):
                node.args, node.kwargs = pytree.tree_map_only(torch.device, device, (node.args, node.kwargs))
                break
        if node.target is ENTER:
            kind: Any = node.args[0]
            new = device(torch.device(kind)).type
            node.update_arg(0, new if torch.amp.is_autocast_available(new) else kind)
        if "val" in node.meta:
            node.meta["val"] = pytree.tree_map_only(Tensor, lambda v: v.to(device(v.device)), node.meta["val"])


def _names(written: torch.device, device: torch.device) -> bool:
    """Does the device in a graph mean this one? Without an index it's the current one of its kind."""
    return written.type == device.type and written.index in (None, device.index)
