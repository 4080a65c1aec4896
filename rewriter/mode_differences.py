"""How the train graph of a model and its eval graph differ: the two aligned node by node."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from resfx.captured import ModuleCall
from resfx.export_route import has_effect
from resfx.fold import take
from resfx.inert import Back, origin_of
from resfx.patterns.dialect import call_entries

Pair = tuple[fx.Node, fx.Node]


class ModesDiffer(Exception):
    """The two graphs can't be joined; the message is the reason."""


@dataclass
class Difference:
    """`to_eval` pairs train nodes with eval nodes; `selections` are pairs of values that one reader takes by mode.

    `evaluated`: what a train node's arguments are in eval mode, flat. `effects`: writes and draws that nobody reads and one mode alone has.
    """

    to_eval: dict[fx.Node, fx.Node]
    selections: list[Pair] = field(default_factory=list)
    evaluated: dict[fx.Node, list[Any]] = field(default_factory=dict)
    effects: tuple[Sequence[fx.Node], Sequence[fx.Node]] = ((), ())


def _key(node: fx.Node) -> tuple[Any, ...]:
    call = node
    while call.target in (operator.getitem, take):
        call = call.all_input_nodes[0]
    if call.op == "call_module":
        # Its place in the source is the last one inside of the leaf, which the modes need not share.
        return (node.op, node.target, _own_entry(call), () if call is node else node.args[1:])
    target = str(node.target) if node.op in ("placeholder", "get_attr") else node.target
    lines = [line.strip() for line in str(node.meta.get("stack_trace", "")).splitlines() if "File " in line]
    return (node.op, target, tuple(call_entries(node)), lines[-1] if lines else "")


def _nodes(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr")]


def _aligned(train: fx.Graph, evaluation: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Train node -> eval node: inputs and attributes by name, the rest by the order of equal operations."""
    pairs: dict[fx.Node, fx.Node] = {}
    named = {(n.op, str(n.target)): n for n in evaluation.nodes if n.op in ("placeholder", "get_attr")}
    for node in train.nodes:
        if node.op in ("placeholder", "get_attr") and (node.op, str(node.target)) in named:
            pairs[node] = named[(node.op, str(node.target))]
    left, right = _nodes(train), _nodes(evaluation)
    left_keys, right_keys = [_key(n) for n in left], [_key(n) for n in right]
    if left_keys == right_keys:
        pairs.update(zip(left, right, strict=True))
        return pairs
    numbers: dict[tuple[Any, ...], int] = {}
    matcher = difflib.SequenceMatcher(
        None,
        [numbers.setdefault(key, len(numbers)) for key in left_keys],
        [numbers.setdefault(key, len(numbers)) for key in right_keys],
        autojunk=False,
    )
    for start, other, length in matcher.get_matching_blocks():
        pairs.update(zip(left[start : start + length], right[other : other + length], strict=True))
    return pairs


def flat_arguments(node: fx.Node) -> tuple[list[Any], Any]:
    """Flat argument values and their structure."""
    leaves, spec = pytree.tree_flatten((list(node.args), dict(node.kwargs)))
    return leaves, spec


def _same_constants(train: fx.Node, evaluation: fx.Node) -> bool:
    left, left_spec = flat_arguments(train)
    right, right_spec = flat_arguments(evaluation)
    if left_spec != right_spec:
        return False
    for a, b in zip(left, right, strict=True):
        if isinstance(a, fx.Node) != isinstance(b, fx.Node):
            return False
        if not isinstance(a, fx.Node) and (type(a) is not type(b) or a != b):
            return False
    return True


def equal_outputs(train: Sequence[ModuleCall], evaluation: Sequence[ModuleCall]) -> set[Pair]:
    """What one leaf call gives in both graphs: the leaf follows its own flag (a DropPath passes through in eval).

    Not what it hands back in both: that others made.
    """
    twins = {call.key: call for call in evaluation}
    found: set[Pair] = set()
    for call in train:
        twin = twins.get(call.key)
        if twin is None:
            continue
        left, left_spec = pytree.tree_flatten(call.output)
        right, right_spec = pytree.tree_flatten(twin.output)
        if left_spec != right_spec:
            raise ModesDiffer(f"`{call.key}` returns another structure in train mode than in eval mode")
        given, twin_given = set(_call_arguments(call)), set(_call_arguments(twin))
        found.update(
            (a, b)
            for a, b in zip(left, right, strict=True)
            if isinstance(a, fx.Node) and not (a in given and b in twin_given)
        )
    return found


def twin_calls(graph: fx.Graph, evaluation: Sequence[ModuleCall]) -> dict[fx.Node, ModuleCall]:
    """The calls of leaves in the folded train graph -> the same in eval mode, where a leaf may leave no trace in the graph."""
    calls = {(call.path, call.index): call for call in evaluation}
    found = {}
    for node in graph.nodes:
        own = _own_entry(node) if node.op == "call_module" else None
        if own in calls:
            found[node] = calls[own]
    return found


def _own_entry(call: fx.Node) -> tuple[str, int] | None:
    """(path, index) of the leaf call that the node is; None for what is no call of the model's own, as a mode switch."""
    return next((entry for entry in reversed(call_entries(call)) if entry[0] == call.target), None)


def _call_arguments(call: ModuleCall) -> list[Any]:
    return pytree.tree_leaves((list(call.args), dict(call.kwargs)))


def compare(
    train: fx.Graph,
    evaluation: fx.Graph,
    in_leaf: Callable[[fx.Node], bool],
    equal: Collection[Pair],
    back: Back,
    twins: Mapping[fx.Node, ModuleCall],
) -> Difference:
    """Align two graphs of one model.

    Nodes for which `in_leaf` holds live in a leaf, which follows its own flag; `equal` are pairs of leaf outputs, `back`
    leads from what hands back its input, in either graph, to that input. `twins` are the calls that `twin_calls` pairs.
    Raises ModesDiffer where the outputs have another structure.
    """
    pairs = _aligned(train, evaluation)
    for node, twin in list(pairs.items()):
        if node.op == "output":
            if not _same_constants(node, twin):
                raise ModesDiffer("the model's outputs have another structure in train mode than in eval mode")
            continue
        if not in_leaf(node) and not _same_constants(node, twin):
            if node.op == "call_module":
                raise ModesDiffer(f"`{node.target}` gets other arguments in train mode than in eval mode")
            del pairs[node]
    difference = Difference(pairs)
    readers = {n: t for n, t in pairs.items() if n.op not in ("placeholder", "get_attr") and not in_leaf(n)}
    difference.evaluated = {node: flat_arguments(twin)[0] for node, twin in readers.items()}
    difference.evaluated |= {node: _call_arguments(call) for node, call in twins.items() if node not in pairs}
    twinned = set(pairs.values())
    difference.effects = (
        [n for n in train.nodes if n not in pairs and not in_leaf(n) and _only_acts(n)],
        [n for n in evaluation.nodes if n not in twinned and not in_leaf(n) and _only_acts(n)],
    )
    seen: set[Pair] = set(equal)
    for node, arguments in difference.evaluated.items():
        for a, b in zip(flat_arguments(node)[0], arguments, strict=True):
            if not isinstance(a, fx.Node) or (a, b) in seen or pairs.get(a) is b:
                continue
            if pairs.get(origin_of(a, back)) is not origin_of(b, back):
                seen.add((a, b))
                difference.selections.append((a, b))
    return difference


def _only_acts(node: fx.Node) -> bool:
    """A write or a random draw that nobody reads; not the border of a region, which is a Python function."""
    return isinstance(node.target, torch._ops.OpOverload) and not node.users and has_effect(node)


def leaf_test(leaves: set[tuple[str, int]]) -> Callable[[fx.Node], bool]:
    """Does a node lie in one of the calls (path, index)?"""
    return lambda node: any(entry in leaves for entry in call_entries(node))
