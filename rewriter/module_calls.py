"""The leaf calls of an exported program, as nodes of today's flat graph."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import ConstantArgument
from torch.utils import _pytree as pytree

from resfx.captured import ModuleCall
from resfx.export_route import Unlifted
from resfx.functionalize import Functional
from resfx.patterns.dialect import call_entries
from resfx.regions import REGION


def module_calls(program: torch.export.ExportedProgram, unlifted: Unlifted, leaves: Iterable[str]) -> list[ModuleCall]:
    """Every call of a leaf, in the order of execution."""
    finder = _Finder(unlifted)
    wanted = set(leaves)
    specs = {entry.fqn: entry.signature for entry in program.module_call_graph if entry.signature is not None}
    found = finder.region_calls(specs, wanted)
    known = {(call.path, call.index) for call in found}
    for entry in program.module_call_graph:
        path, _, number = entry.fqn.partition("@")
        if path not in wanted or entry.signature is None or (path, int(number or 0)) in known:
            continue
        call = finder.call(path, int(number or 0), entry.signature)
        if call is not None:
            found.append(call)
    found.sort(key=lambda call: finder.start.get((call.path, call.index), 0))
    return found


def refreshed(calls: Iterable[ModuleCall], graph: fx.Graph, functional: Functional) -> list[ModuleCall]:
    """Calls recorded before functionalising, in terms of the nodes that are there now."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    start, end = _spans(order)

    def now(tree: Any, position: int) -> Any:
        return pytree.tree_map_only(fx.Node, lambda node: functional.value_of(node, order, position), tree)

    found = []
    for call in calls:
        first = start.get((call.path, call.index), 0)
        after = end.get((call.path, call.index), first) + 1
        args, kwargs = now((call.args, call.kwargs), first)
        found.append(ModuleCall(call.path, call.index, args, kwargs, now(call.output, after)))
    found.sort(key=lambda call: start.get((call.path, call.index), 0))
    return found


def _spans(order: dict[fx.Node, int]) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], int]]:
    """The first and the last position of every module call."""
    start: dict[tuple[str, int], int] = {}
    end: dict[tuple[str, int], int] = {}
    for node, position in order.items():
        for entry in call_entries(node):
            start.setdefault(entry, position)
            end[entry] = position
    return start, end


class _Finder:
    """Finds today's node by the name an argument had in the export, when the call ran."""

    def __init__(self, unlifted: Unlifted) -> None:
        self.unlifted = unlifted
        self.order = {node: i for i, node in enumerate(unlifted.module.graph.nodes)}
        self.start, self.end = _spans(self.order)
        self.regions: dict[tuple[str, int], set[int]] = {}
        for node in self.order:
            for entry in call_entries(node):
                self.regions.setdefault(entry, set()).add(int(node.meta.get(REGION, 0)))

    def region_calls(self, specs: dict[str, Any], wanted: set[str]) -> list[ModuleCall]:
        """The calls inside no_grad and autocast regions, of which the export only left marks."""
        ends: dict[tuple[str, int], dict[str, tuple[Any, ...]]] = {}
        for point in self.unlifted.tracepoints:
            if point.path in wanted and point.path in specs:
                ends.setdefault((point.path, point.index), {})[point.kind] = point.values
        found = []
        for (path, index), values in ends.items():
            if len(values) == 2:
                start = self.start.get((path, index), 0)
                end = self.end.get((path, index), start)
                inputs = [self._now(value, start) for value in values["module_call_inputs"]]
                outputs = [self._now(value, end + 1) for value in values["module_call_outputs"]]
                found.append(_module_call(path, index, specs[path], inputs, outputs))
        return found

    def call(self, path: str, index: int, signature: Any) -> ModuleCall | None:
        # Not all inputs were noted, as for the input guards of a program within: what the call computes stays as it is.
        if len(signature.inputs) != signature.in_spec.num_leaves:
            return None
        names = [a.name for a in (*signature.inputs, *signature.outputs) if not isinstance(a, ConstantArgument)]
        region = self._home((path, index), names)
        if region is None:
            return None
        start = self.start.get((path, index), 0)
        end = self.end.get((path, index), start)
        inputs = [self._value(argument, region, start) for argument in signature.inputs]
        outputs = [self._value(argument, region, end + 1) for argument in signature.outputs]
        return _module_call(path, index, signature, inputs, outputs)

    def _home(self, entry: tuple[str, int], names: list[str]) -> int | None:
        """The outermost region around the call's nodes that knows all names (0: the top level)."""
        candidates: set[int] = set()
        for region in self.regions.get(entry, {0}):
            while region and region not in candidates:
                candidates.add(region)
                region = self.unlifted.parents.get(region, 0)
            candidates.add(0)
        fitting = [r for r in candidates if all((r, name) in self.unlifted.origin for name in names)]
        if not fitting:
            return None
        own = self.regions.get(entry)
        if own is not None and len(own) == 1 and next(iter(own)) in fitting and not self._entered_inside(entry):
            return next(iter(own))
        return min(fitting, key=self._depth)

    def _entered_inside(self, entry: tuple[str, int]) -> bool:
        """Does the call itself open the region (it has nodes, its borders for one, outside of it)?"""
        return len(self.regions.get(entry, ())) > 1

    def _depth(self, region: int) -> int:
        depth = 0
        while region:
            region, depth = self.unlifted.parents.get(region, 0), depth + 1
        return depth

    def _value(self, argument: Any, region: int, position: int) -> Any:
        if isinstance(argument, ConstantArgument):
            return argument.value
        return self._now(self.unlifted.origin[(region, argument.name)], position)

    def _now(self, value: Any, position: int) -> Any:
        if not isinstance(value, fx.Node):
            return value
        return self.unlifted.functional.value_of(value, self.order, position)


def _module_call(path: str, index: int, signature: Any, inputs: list[Any], outputs: list[Any]) -> ModuleCall:
    args, kwargs = pytree.tree_unflatten(inputs, signature.in_spec)
    return ModuleCall(path, index, args, kwargs, pytree.tree_unflatten(outputs, signature.out_spec))
