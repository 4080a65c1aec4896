"""Glue that differs between train and eval becomes a small module that follows `.training`.

The train graph and the eval graph are aligned node by node. Wherever a common node reads one thing in train mode and
another in eval mode, both computations move into a `ModeSwitch`.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from resfx.captured import ModuleCall
from resfx.export_route import has_effect, remove_dead
from resfx.inert import Back, origin_of
from resfx.patterns.dialect import call_entries
from resfx.root import add_constant, free_name

Pair = tuple[fx.Node, fx.Node]


class ModeSwitch(nn.Module):
    """Runs one of two parameterless graphs on the same inputs, by `.training`."""

    def __init__(self, in_train: fx.GraphModule, in_eval: fx.GraphModule) -> None:
        super().__init__()
        self.in_train = in_train
        self.in_eval = in_eval

    def forward(self, *inputs: Any) -> Any:
        return self.in_train(*inputs) if self.training else self.in_eval(*inputs)


class ModesDiffer(Exception):
    """The two graphs can't be joined; the message is the reason."""


@dataclass
class Difference:
    """`to_eval` pairs train nodes with eval nodes; `selections` are pairs of values that one reader takes by mode."""

    to_eval: dict[fx.Node, fx.Node]
    selections: list[Pair] = field(default_factory=list)


def _key(node: fx.Node) -> tuple[Any, ...]:
    target = str(node.target) if node.op in ("placeholder", "get_attr", "call_module") else node.target
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


def _arguments(node: fx.Node) -> tuple[list[Any], Any]:
    """Flat argument values and their structure."""
    leaves, spec = pytree.tree_flatten((list(node.args), dict(node.kwargs)))
    return leaves, spec


def _same_constants(train: fx.Node, evaluation: fx.Node) -> bool:
    left, left_spec = _arguments(train)
    right, right_spec = _arguments(evaluation)
    if left_spec != right_spec:
        return False
    for a, b in zip(left, right, strict=True):
        if isinstance(a, fx.Node) != isinstance(b, fx.Node):
            return False
        if not isinstance(a, fx.Node) and (type(a) is not type(b) or a != b):
            return False
    return True


def equal_outputs(train: Sequence[ModuleCall], evaluation: Sequence[ModuleCall]) -> set[Pair]:
    """What one leaf call gives in both graphs: the leaf follows its own flag (a DropPath passes through in eval)."""
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
        found.update((a, b) for a, b in zip(left, right, strict=True) if isinstance(a, fx.Node))
    return found


def compare(
    train: fx.Graph,
    evaluation: fx.Graph,
    in_leaf: Callable[[fx.Node], bool],
    equal: Collection[Pair],
    back: Back,
) -> Difference:
    """Align two graphs of one model.

    Nodes for which `in_leaf` holds live in a leaf, which follows its own flag; `equal` are pairs of leaf outputs, `back`
    leads from what hands back its input, in either graph, to that input.
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
    seen: set[Pair] = set(equal)
    for node, twin in pairs.items():
        if node.op in ("placeholder", "get_attr") or in_leaf(node):
            continue
        for a, b in zip(_arguments(node)[0], _arguments(twin)[0], strict=True):
            if not isinstance(a, fx.Node) or (a, b) in seen or pairs.get(a) is b:
                continue
            if pairs.get(origin_of(a, back)) is not origin_of(b, back):
                seen.add((a, b))
                difference.selections.append((a, b))
    return difference


@dataclass
class _Group:
    """Selections that share computation: they become one switch."""

    selections: list[Pair]
    train: set[fx.Node]
    evaluation: set[fx.Node]


def _slice(value: fx.Node, known: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """The nodes behind `value` that only one mode has."""
    found: set[fx.Node] = set()
    stack = [value]
    while stack:
        node = stack.pop()
        if node in found or known(node) or node.op in ("placeholder", "get_attr"):
            continue
        found.add(node)
        stack.extend(node.all_input_nodes)
    return found


def _groups(difference: Difference) -> list[_Group]:
    twins = set(difference.to_eval.values())
    groups: list[_Group] = []
    for a, b in difference.selections:
        group = _Group([(a, b)], _slice(a, lambda n: n in difference.to_eval), _slice(b, lambda n: n in twins))
        rest = []
        for other in groups:
            # Shared arithmetic may run in both; a shared random draw or write may not.
            if any(has_effect(n) for n in (other.train & group.train) | (other.evaluation & group.evaluation)):
                group.selections = other.selections + group.selections
                group.train |= other.train
                group.evaluation |= other.evaluation
            else:
                rest.append(other)
        groups = [*rest, group]
    return groups


def join_modes(
    module: fx.GraphModule, difference: Difference, eval_module: fx.GraphModule, training: bool
) -> dict[fx.Node, fx.Node]:
    """Put a ModeSwitch wherever the (train) graph of `module` differs from eval; returns old value -> new value."""
    mapping: dict[fx.Node, fx.Node] = {}
    for group in _groups(difference):
        mapping.update(_Joiner(module, eval_module, difference, group, training).run())
    try:
        remove_dead(module.graph)
    except RuntimeError as error:
        raise ModesDiffer("one random draw feeds several stages that differ between train and eval") from error
    module.recompile()
    return mapping


class _Joiner:
    def __init__(
        self, module: fx.GraphModule, eval_module: fx.GraphModule, difference: Difference, group: _Group, training: bool
    ) -> None:
        self.module, self.graph, self.eval_module = module, module.graph, eval_module
        self.to_eval, self.group, self.training = difference.to_eval, group, training
        self.to_train = {b: a for a, b in difference.to_eval.items()}
        self.position = {node: i for i, node in enumerate(self.graph.nodes)}

    def run(self) -> dict[fx.Node, fx.Node]:
        train_inputs = self._boundary(self.group.train, [a for a, _ in self.group.selections])
        eval_inputs = self._boundary(self.group.evaluation, [b for _, b in self.group.selections])
        inputs: dict[fx.Node, fx.Node] = {node: node for node in train_inputs}
        for node in eval_inputs:
            inputs.setdefault(self._train_value(node), node)
        order = list(inputs)
        switch = ModeSwitch(
            _extract(self.module, order, self.group.train, [a for a, _ in self.group.selections], lambda n: n),
            _extract(
                self.eval_module, order, self.group.evaluation, [b for _, b in self.group.selections], self._train_value
            ),
        )
        switch.train(self.training)
        name = free_name(self.module, "mode_switch")
        self.module.add_submodule(name, switch)
        return self._insert(name, order)

    def _boundary(self, inside: set[fx.Node], values: list[fx.Node]) -> list[fx.Node]:
        outside = [value for value in values if value not in inside]
        outside += [source for node in inside for source in node.all_input_nodes if source not in inside]
        return list(dict.fromkeys(outside))

    def _train_value(self, node: fx.Node) -> fx.Node:
        """The train graph's node for a value of the eval graph."""
        if node in self.to_train:
            return self.to_train[node]
        if node.op != "get_attr":
            raise ModesDiffer(f"`{node.name}` exists in eval mode only and feeds both")
        target = str(node.target)
        if not _has_attribute(self.module, target):
            target = add_constant(self.module, target, self.eval_module.get_buffer(target))
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            new = self.graph.get_attr(target)
        new.meta = dict(node.meta)
        self.to_train[node] = new
        self.position[new] = -1
        return new

    def _insert(self, name: str, inputs: list[fx.Node]) -> dict[fx.Node, fx.Node]:
        before = [*inputs, *self.group.train]
        last = max(before, key=lambda n: self.position.get(n, -1))
        point = last.next
        while point.op in ("placeholder", "get_attr"):
            point = point.next
        mapping: dict[fx.Node, fx.Node] = {}
        with self.graph.inserting_before(point):
            call = self.graph.call_module(name, tuple(inputs))
            values = [a.meta.get("val") for a, _ in self.group.selections]
            call.meta["val"] = values[0] if len(values) == 1 else tuple(values)
            for index, (a, b) in enumerate(self.group.selections):
                value = call
                if len(values) > 1:
                    value = self.graph.call_function(operator.getitem, (call, index))
                value.meta = {**{k: v for k, v in a.meta.items() if k != "val"}, "val": values[index]}
                self._redirect(a, b, value)
                mapping[a] = value
        if len(values) > 1:
            call.meta.update({k: v for k, v in self.group.selections[0][0].meta.items() if k != "val"})
        # Moved, not copied: a random draw must not happen twice.
        for node in reversed(list(_ordered(self.graph, self.group.train))):
            if not node.users:
                self.graph.erase_node(node)
        return mapping

    def _redirect(self, a: fx.Node, b: fx.Node, value: fx.Node) -> None:
        """Readers that take `a` in train mode and `b` in eval mode read the switch."""
        for user in list(a.users):
            twin = self.to_eval.get(user)
            if twin is None or b not in twin.all_input_nodes:
                continue
            left, spec = _arguments(user)
            right = _arguments(twin)[0]
            leaves = [value if x is a and y is b else x for x, y in zip(left, right, strict=True)]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            user.args, user.kwargs = tuple(args), kwargs


def _has_attribute(module: nn.Module, target: str) -> bool:
    value: Any = module
    for part in target.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def _ordered(graph: fx.Graph, nodes: set[fx.Node]) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node in nodes)


def _extract(
    module: fx.GraphModule,
    inputs: list[fx.Node],
    inside: set[fx.Node],
    results: list[fx.Node],
    outer: Callable[[fx.Node], fx.Node],
) -> fx.GraphModule:
    """The nodes of `inside` as a module of its own; `outer` takes their outside values to the entries of `inputs`."""
    graph = fx.Graph()
    placeholders = {node: graph.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    env: dict[fx.Node, fx.Node] = {}

    def value(node: fx.Node) -> fx.Node:
        return env[node] if node in inside else placeholders[outer(node)]

    for node in _ordered(module.graph, inside):
        if node.op not in ("call_function", "call_method"):
            raise ModesDiffer(f"the module `{node.target}` is called in one mode only")
        env[node] = graph.node_copy(node, value)
    found = tuple(value(node) for node in results)
    graph.output(found[0] if len(found) == 1 else found)
    return fx.GraphModule(nn.Module(), graph)


def leaf_test(leaves: set[tuple[str, int]]) -> Callable[[fx.Node], bool]:
    """Does a node lie in one of the calls (path, index)?"""
    return lambda node: any(entry in leaves for entry in call_entries(node))


__all__ = ["Difference", "ModeSwitch", "ModesDiffer", "compare", "equal_outputs", "join_modes", "leaf_test"]
