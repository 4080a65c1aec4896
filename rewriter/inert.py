"""Operations that hand back their very input: dropout that is off, a cast to the dtype that it has.

torch.export knows tensors by their identity, and so lets every later reader of the input read such an operation. Where it lies in
a leaf, its readers outside read the input again. Where train and eval differ, the train graph tells who reads which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from resfx.captured import ModuleCall
from resfx.patterns.dialect import call_entries

aten = torch.ops.aten

_DROPOUTS = (
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)
_CASTS = (aten.to, aten.type_as, aten.contiguous)

Back = Mapping[fx.Node, fx.Node]


def handed_back(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Every such node -> its input."""
    return {node: node.all_input_nodes[0] for node in graph.nodes if _is_dropout_off(node) or _is_cast_to_itself(node)}


def _is_dropout_off(node: fx.Node) -> bool:
    return node.target in _DROPOUTS and node.args[2] is False


def _is_cast_to_itself(node: fx.Node) -> bool:
    if getattr(node.target, "overloadpacket", None) not in _CASTS:
        return False
    value, source = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
        return False
    return value.dtype == source.dtype and value.device == source.device and value.stride() == source.stride()


def moved(back: Back, mapping: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """The same for a folded graph; `mapping` takes its old nodes to what they are now."""
    pairs = ((mapping.get(node, node), mapping.get(source, source)) for node, source in back.items())
    return {node: source for node, source in pairs if node is not source}


def origin_of(node: fx.Node, back: Back) -> fx.Node:
    """What was handed back, any number of times, to become `node`."""
    while node in back:
        node = back[node]
    return node


def leave_casts(graph: fx.Graph) -> None:
    """For a search, where calls have no outputs yet: who reads a cast to itself outside of its call reads what was cast.

    A norm that casts its input would seem to cast the stream that goes on beside it.
    """
    back = {node: source for node, source in handed_back(graph).items() if _is_cast_to_itself(node)}
    for node in back:
        own = call_entries(node)
        source = back[node]
        while source in back and call_entries(source)[: len(own)] == own:
            source = back[source]
        for user in list(node.users):
            if call_entries(user)[: len(own)] != own:
                user.replace_input_with(node, source)


def read_outside(graph: fx.Graph, calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """Let nobody outside of a call read what it handed back to itself: only its outputs leave it. Returns the calls as they are then."""
    outputs = {(call.path, call.index): set(pytree.tree_leaves(call.output)) for call in calls}
    back = handed_back(graph)
    inputs: dict[fx.Node, fx.Node] = {}
    for node in back:
        owner = next((entry for entry in call_entries(node) if entry in outputs), None)
        if owner is None or node in outputs[owner]:
            continue
        source = back[node]
        while source in back and owner in call_entries(source) and source not in outputs[owner]:
            source = back[source]
        inputs[node] = source
        for user in list(node.users):
            if owner not in call_entries(user):
                user.replace_input_with(node, source)
    return [_with(call, inputs) for call in calls]


def _with(call: ModuleCall, inputs: Back) -> ModuleCall:
    def moved(tree: Any) -> Any:
        return pytree.tree_map_only(fx.Node, lambda node: inputs.get(node, node), tree)

    return replace(call, args=moved(call.args), kwargs=moved(call.kwargs), output=moved(call.output))
