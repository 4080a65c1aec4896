"""Values of a stream that changes its layout: forms see the entry's layout, the graph the current one.

A layout step is a permutation or a reshape. Which one is found by running the step on a small tensor, not by its name,
so that every spelling (transpose, movedim, .mT, flatten, view, ..) is understood.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from resfx.passes import ops
from resfx.passes.editor import Editor, carrying_path, value_of

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


@dataclass(frozen=True)
class Step:
    """One layout event: `order` of a permutation, None for a reshape."""

    path: tuple[Node, ...]
    before: Node
    after: Node
    order: tuple[int, ...] | None
    like: Node  # a live value of the layout before the step


def same_shape(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether two shapes, symbolic sizes included, are known to be equal."""
    a, b = tuple(a), tuple(b)
    return len(a) == len(b) and all(statically_known_true(x == y) for x, y in zip(a, b, strict=True))


def read_step(graph_module: GraphModule, before: Node, after: Node) -> Step | None:
    """The step of a layout event; None where it is neither a permutation nor a reshape."""
    path = tuple(carrying_path(before, after, ()))
    order = _permutation(graph_module, before, path)
    if order is None and not _is_reshape(graph_module, before, path):
        return None
    return Step(path, before, after, order, before)


def _permutation(graph_module: GraphModule, before: Node, path: tuple[Node, ...]) -> tuple[int, ...] | None:
    shape, result = tuple(value_of(before).shape), tuple(value_of(path[-1]).shape)
    if len(shape) != len(result) or len(shape) > len(_PRIMES):
        return None
    sizes = _PRIMES[: len(shape)]
    try:
        probed = _evaluate(graph_module, path, {before: torch.empty(sizes, device="meta")})
    except (RuntimeError, TypeError, IndexError, ValueError, LookupError):
        return None  # it needs particular sizes: no permutation
    if sorted(probed.shape) != sorted(sizes):
        return None
    order = tuple(sizes.index(size) for size in probed.shape)
    return order if same_shape((shape[axis] for axis in order), result) else None


def _is_reshape(graph_module: GraphModule, before: Node, path: tuple[Node, ...]) -> bool:
    """Whether the step keeps the order of the elements: a contiguous tensor stays contiguous."""
    state = value_of(before)
    env = {node: value_of(node) for step in path for node in step.all_input_nodes if node not in path}
    env[before] = state.new_empty(state.shape)
    try:
        return bool(_evaluate(graph_module, path, env).is_contiguous())
    except (RuntimeError, TypeError):
        return False  # the step can't be run on a tensor of that shape


def _evaluate(graph_module: GraphModule, path: tuple[Node, ...], env: dict[Node, Any]) -> Any:
    env = dict(env)
    for node in path:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: env[n])
        target: Any = node.target
        if node.op == "call_module":
            target = graph_module.get_submodule(str(target))
        elif node.op == "call_method":
            target = getattr(args[0], str(target))
            args = args[1:]
        env[node] = target(*args, **kwargs)
    return env[path[-1]]


class Layouts:
    """The steps between the entry's layout and the current one."""

    def __init__(self, editor: Editor, steps: tuple[Step, ...] = ()) -> None:
        self._editor = editor
        self.steps = steps

    def then(self, step: Step, like: Node) -> Layouts:
        """One step on, from the live value `like`; a step that undoes the one before it cancels with it."""
        if self.steps and _undoes(self.steps[-1], step):
            return Layouts(self._editor, self.steps[:-1])
        return Layouts(self._editor, (*self.steps, replace(step, like=like)))

    def to_entry(self, value: Node) -> Node:
        """A value of the current layout in the entry's."""
        for step in reversed(self.steps):
            if step.order is None:
                value = self._editor.call(ops.reshape_like, value, step.like)
            else:
                value = self._editor.call(ops.permute, value, _inverse(step.order))
        return value

    def from_entry(self, value: Node) -> Node:
        """A value of the entry's layout in the current one."""
        for step in self.steps:
            value = self._editor.copy(list(step.path), {step.before: value})
        return value


def _inverse(order: tuple[int, ...]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def _undoes(first: Step, second: Step) -> bool:
    if first.order is not None and second.order is not None:
        return list(second.order) == _inverse(first.order)
    if first.order is None and second.order is None:
        return same_shape(value_of(first.before).shape, value_of(second.after).shape)
    return False
