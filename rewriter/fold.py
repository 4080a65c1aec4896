"""Folding: the traced nodes of every leaf call become one `call_module` of the user's own submodule."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch.fx.node import base_types
from torch.utils import _pytree as pytree

from resfx.captured import Captured, ModuleCall
from resfx.export_route import has_effect, remove_dead
from resfx.functionalize import Functional, written_arguments
from resfx.patterns.dialect import call_entries
from resfx.regions import NO_GRAD

aten = torch.ops.aten

_FOREIGN_WRITE = "a value of the caller is written in place"


def take(value: Any, index: int) -> Any:
    """The `index`-th tensor of a container, in pytree order."""
    return pytree.tree_leaves(value)[index]


@dataclass
class _Region:
    """The nodes of one leaf call, in order."""

    call: ModuleCall
    nodes: list[fx.Node]
    inside: set[fx.Node]
    outputs: list[fx.Node]  # what the call produced, without passed-through inputs


def sift(captured: Captured) -> set[str]:
    """Take out of `captured.calls` what can't be folded, with a note that says why. Returns the paths taken out."""
    members = _members(captured.graph, captured.calls)
    refused: dict[str, list[str]] = {}
    kept: list[ModuleCall] = []
    for call in captured.calls:
        region = _region(call, members.get((call.path, call.index), []))
        reason = _obstacle(region, captured.functional) or _foreign_read(region, captured.graph_module)
        if reason is None:
            kept.append(call)
        else:
            refused.setdefault(reason, []).append(call.key)
    captured.calls = kept
    captured.notes.extend(_refusals(refused))
    return {key.partition("@")[0] for keys in refused.values() for key in keys}


def fold(captured: Captured) -> dict[fx.Node, fx.Node]:
    """Fold every call of `captured.calls` in place; `sift` has taken out those that can't be.

    Returns old flat node -> new node for the values that are used outside of the leaves; all other nodes outside stay
    the same objects.
    """
    graph = captured.graph
    members = _members(graph, captured.calls)
    position = {node: i for i, node in enumerate(graph.nodes)}
    mapping: dict[fx.Node, fx.Node] = {}
    for call in captured.calls:
        region = _region(call, members.get((call.path, call.index), []))
        if region.outputs or any(has_effect(node) for node in region.nodes):
            _replace(graph, region, position, mapping)
    captured.calls = [_mapped(call, mapping) for call in captured.calls]
    remove_dead(graph)
    captured.graph_module.recompile()
    return mapping


def _members(graph: fx.Graph, calls: Sequence[ModuleCall]) -> dict[tuple[str, int], list[fx.Node]]:
    """The nodes of every call, in order."""
    last_call = {call.path: call.index for call in calls}
    wanted = {(call.path, call.index) for call in calls}
    members: dict[tuple[str, int], list[fx.Node]] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        owner = next((entry for entry in call_entries(node) if entry in wanted), None) or _state_owner(node, last_call)
        if owner is not None:
            members.setdefault(owner, []).append(node)
    return members


def _state_owner(node: fx.Node, last_call: dict[str, int]) -> tuple[str, int] | None:
    """`self.count = self.count + 1` arrives as a copy_ at the end of the graph; it belongs to the leaf's last call."""
    if node.target is not aten.copy_.default or node.users:
        return None
    target = node.args[0]
    if not isinstance(target, fx.Node) or target.op != "get_attr":
        return None
    name = str(target.target)
    path = next((path for path in last_call if name.startswith(path + ".")), None)
    return None if path is None else (path, last_call[path])


def _leaves(tree: Any) -> list[fx.Node]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, fx.Node)]


def _region(call: ModuleCall, nodes: list[fx.Node]) -> _Region:
    inside = set(nodes) - _shared_sizes(nodes)
    inputs = set(_leaves((call.args, call.kwargs)))
    outputs = list(dict.fromkeys(n for n in _leaves(call.output) if n in inside and n not in inputs))
    return _Region(call, [node for node in nodes if node in inside], inside, outputs)


def _shared_sizes(nodes: list[fx.Node]) -> set[fx.Node]:
    """Sizes computed from outside values may be read by others too (torch computes equal sizes once); they stay."""
    members = set(nodes)
    free: set[fx.Node] = set()
    for node in nodes:
        if not _is_tensor(node) and all(source in free or source not in members for source in node.all_input_nodes):
            free.add(node)
    shared: set[fx.Node] = set()
    for node in reversed(nodes):
        if node in free and any(user in shared or user not in members for user in node.users):
            shared.add(node)
    return shared


def _is_tensor(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return value is None or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _obstacle(region: _Region, functional: Functional) -> str | None:
    for node in region.nodes:
        if node not in region.outputs and any(user not in region.inside for user in node.users):
            return "a value computed inside is read outside but is none of the outputs"
        base = functional.writes.get(node)
        if base is not None and base not in region.inside and base.op != "get_attr":
            return _FOREIGN_WRITE
        for target in written_arguments(node):
            if target not in region.inside and target.op != "get_attr":
                return _FOREIGN_WRITE
    for leaf in pytree.tree_leaves((region.call.args, region.call.kwargs), is_leaf=lambda x: not _is_plain(x)):
        if isinstance(leaf, torch.Tensor):
            return "it is called with a tensor the graph doesn't know (inside vmap, for one)"
        if not isinstance(leaf, (*base_types, fx.Node, type(None), type(...))):
            return f"it takes a {type(leaf).__name__}, which no graph can hold"
    return None


def _foreign_read(region: _Region, root: fx.GraphModule) -> str | None:
    """The call would not see what was swapped in for its weights (functional_call), nor what a hook made of its arguments."""
    module = root.get_submodule(region.call.path)
    if any(inner._forward_pre_hooks for inner in module.modules()):
        return "it has a forward_pre_hook, which would run on what it made already"
    own = {id(parameter) for parameter in module.parameters()}
    arguments = set(_leaves((region.call.args, region.call.kwargs)))
    for node in region.nodes:
        for source in node.all_input_nodes:
            if source in region.inside or source in arguments or not _is_tensor(source):
                continue
            value = attrgetter(str(source.target))(root) if source.op == "get_attr" else None
            if source.op != "get_attr" or (isinstance(value, torch.nn.Parameter) and id(value) not in own):
                return "it reads a value that is none of its arguments and weights"
    return None


def _refusals(refused: dict[str, list[str]]) -> list[str]:
    notes = []
    for reason, keys in refused.items():
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        notes.append(f"kept as traced operations: {', '.join(keys[:3])}{more} ({reason})")
    return notes


def _is_plain(value: Any) -> bool:
    return type(value) in (tuple, list, dict)


def _replace(graph: fx.Graph, region: _Region, position: dict[fx.Node, int], mapping: dict[fx.Node, fx.Node]) -> None:
    call = region.call
    last = next((node for node in reversed(region.nodes) if call_entries(node)[-1:] != []), region.nodes[-1])
    args, kwargs = _through(mapping, (call.args, call.kwargs))
    with graph.inserting_before(_insertion_point(region, position)):
        new = graph.call_module(call.path, tuple(args), dict(kwargs))
        for key in ("stack_trace", "nn_module_stack", "torch_fn"):
            if key in last.meta:
                new.meta[key] = last.meta[key]
        new.meta["val"] = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"), call.output)
        replacements = _outputs(graph, region, new)
    for old, value in replacements.items():
        old.replace_all_uses_with(value, delete_user_cb=lambda user: user not in region.inside)
        mapping[old] = value
    for node in reversed(region.nodes):
        graph.erase_node(node)


def _through(mapping: dict[fx.Node, fx.Node], tree: Any) -> Any:
    return pytree.tree_map_only(fx.Node, lambda n: mapping.get(n, n), tree)


def _mapped(call: ModuleCall, mapping: dict[fx.Node, fx.Node]) -> ModuleCall:
    args, kwargs = _through(mapping, (call.args, call.kwargs))
    return ModuleCall(call.path, call.index, args, kwargs, _through(mapping, call.output))


def _insertion_point(region: _Region, position: dict[fx.Node, int]) -> fx.Node:
    """The first inner node after all inputs (an input's newest value may be made at its first reader)."""
    inputs = [position[n] for n in _leaves((region.call.args, region.call.kwargs)) if n in position]
    latest = max(inputs, default=-1)
    return next((node for node in region.nodes if position[node] > latest), region.nodes[-1])


def _outputs(graph: fx.Graph, region: _Region, call: fx.Node) -> dict[fx.Node, fx.Node]:
    """Each produced value as read from the call."""
    output = region.call.output
    found: dict[fx.Node, fx.Node] = {}
    if isinstance(output, fx.Node):
        found[output] = call
    else:
        _items(graph, output, call, region, found)
        # What sits in other containers is read by its number.
        for index, leaf in enumerate(pytree.tree_leaves(output)):
            if isinstance(leaf, fx.Node) and leaf in region.outputs and leaf not in found:
                found[leaf] = graph.call_function(take, (call, index))
    for old, new in list(found.items()):
        if new is not call:
            new.meta = {k: v for k, v in old.meta.items() if k != NO_GRAD}
        if old.meta.get(NO_GRAD):
            detached = graph.call_function(aten.detach.default, (new,))
            detached.meta = dict(old.meta)
            found[old] = detached
    return found


def _items(graph: fx.Graph, tree: Any, value: fx.Node, region: _Region, found: dict[fx.Node, fx.Node]) -> None:
    """getitem nodes for what lies in nested tuples, lists and dicts."""
    if not _is_plain(tree):
        return
    for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
        leaves = [leaf for leaf in _leaves(item) if leaf in region.outputs and leaf not in found]
        if not leaves or not (isinstance(item, fx.Node) or _is_plain(item)):
            continue
        part = graph.call_function(operator.getitem, (value, key))
        if isinstance(item, fx.Node):
            found[item] = part
            continue
        part.meta = {k: v for k, v in value.meta.items() if k != "val"}
        part.meta["val"] = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"), item)
        _items(graph, item, part, region, found)
