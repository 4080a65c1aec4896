"""The marks that torch.export leaves inside regions.

`preserve_module_call_signature` brackets every call with a tracepoint node; torch resolves those of the top level into
`module_call_graph` and leaves those inside no_grad and autocast regions in place.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from resfx.patterns.dialect import call_entries


@dataclass(frozen=True)
class Tracepoint:
    """The flat inputs or outputs of one call: nodes and constants."""

    path: str
    index: int
    kind: str  # "module_call_inputs" or "module_call_outputs"
    values: tuple[Any, ...]


def resolve_tracepoints(graph: fx.Graph, origin: dict[tuple[int, str], fx.Node]) -> list[Tracepoint]:
    """Remove the tracepoints from an inlined graph; returns what they said."""
    found = []
    replaced: dict[fx.Node, Any] = {}
    for node in list(graph.nodes):
        if not is_tracepoint(node):
            continue
        path = str(node.kwargs["path"]).removeprefix("_export_root.")
        entries = call_entries(node)
        if not entries or entries[-1][0] == path:
            index = entries[-1][1] if entries else 0
            found.append(Tracepoint(path, index, str(node.kwargs["kind"]), tuple(node.args)))
        for user in list(node.users):
            if user.target is operator.getitem:
                value = node.args[user.args[1]]
                replaced[user] = value
                if isinstance(value, fx.Node):
                    user.replace_all_uses_with(value)
                graph.erase_node(user)
        graph.erase_node(node)
    for key, value in list(origin.items()):
        while value in replaced:
            value = replaced[value]
        if isinstance(value, fx.Node) and not is_tracepoint(value):
            origin[key] = value
        else:
            del origin[key]
    return found


def is_tracepoint(node: fx.Node) -> bool:
    """Is it a mark around a call?"""
    # A private higher-order op: recognised by its name, so that its absence does no harm.
    target = node.target
    if not isinstance(target, torch._ops.HigherOrderOperator):
        return False
    return bool(target.name() == "_export_tracepoint")  # type: ignore[no-untyped-call]
