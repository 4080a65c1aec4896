"""Glue that differs between train and eval becomes a small module that follows the `.training` of the module whose glue it is.

Wherever a node that both graphs have reads one thing in train mode and another in eval mode, both computations move into
a `ModeSwitch`; so does a write or a random draw that one mode alone has.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from resfx.export_route import has_effect, remove_dead
from resfx.mode_differences import Difference, ModesDiffer, Pair, flat_arguments
from resfx.patterns.dialect import module_path
from resfx.root import add_constant, free_name


class ModeSwitch(nn.Module):
    """Runs one of two parameterless graphs on the same inputs, by the `.training` of `owner`: None for the root, whose child it is."""

    owner: nn.Module | None

    def __init__(self, in_train: fx.GraphModule, in_eval: fx.GraphModule, owner: nn.Module | None) -> None:
        super().__init__()
        self.in_train = in_train
        self.in_eval = in_eval
        self.__dict__["owner"] = owner  # no child: it has its place in the tree, and its names in the state_dict

    def forward(self, *inputs: Any) -> Any:
        training = self.training if self.owner is None else self.owner.training
        return self.in_train(*inputs) if training else self.in_eval(*inputs)


@dataclass
class _Group:
    """Selections and effects that share computation: they become one switch."""

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

    def behind(train: Sequence[fx.Node], evaluation: Sequence[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
        return (
            {n for value in train for n in _slice(value, lambda n: n in difference.to_eval)},
            {n for value in evaluation for n in _slice(value, lambda n: n in twins)},
        )

    found = [_Group([(a, b)], *behind([a], [b])) for a, b in difference.selections]
    found += [_Group([], *behind([node], [])) for node in difference.effects[0]]
    found += [_Group([], *behind([], [node])) for node in difference.effects[1]]
    groups: list[_Group] = []
    for group in found:
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
        self.evaluated, self.group, self.training = difference.evaluated, group, training
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
            self._owner(),
        )
        switch.train(self.training)
        name = free_name(self.module, "mode_switch")
        self.module.add_submodule(name, switch)
        return self._insert(name, order)

    def _owner(self) -> nn.Module | None:
        """The module that runs all of the group itself; the root where several do."""
        paths = {module_path(node).partition("@")[0] for node in self.group.train | self.group.evaluation}
        path = paths.pop() if len(paths) == 1 else ""
        return self.module.get_submodule(path) if path and _has_attribute(self.module, path) else None

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
        if len(values) != 1:
            like = next(iter([a for a, _ in self.group.selections] or self.group.train or self.group.evaluation))
            call.meta.update({k: v for k, v in like.meta.items() if k != "val"})
        # Moved, not copied: a random draw must not happen twice.
        for node in reversed(list(_ordered(self.graph, self.group.train))):
            if not node.users:
                self.graph.erase_node(node)
        return mapping

    def _redirect(self, a: fx.Node, b: fx.Node, value: fx.Node) -> None:
        """Readers that take `a` in train mode and `b` in eval mode read the switch."""
        for user in list(a.users):
            right = self.evaluated.get(user, ())
            if b not in right:
                continue
            left, spec = flat_arguments(user)
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
            raise ModesDiffer(f"the module `{node.target}` is called in one mode only, or otherwise in the other")
        env[node] = graph.node_copy(node, value)
    found = tuple(value(node) for node in results)
    graph.output(found[0] if len(found) == 1 else found)
    return fx.GraphModule(nn.Module(), graph)
