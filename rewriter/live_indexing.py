"""`x[:, :1]` and `x[:, :1] = v` of a Dynamo graph as the slices, selects and copies that torch.export would have made of them.

So one vocabulary is enough for the search, and for making in-place updates functional. So are reads and writes by tensors of
indices, `x[:, rows]`; what mixes both ways of indexing stays.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import fx

from resfx.twins import fake_result

aten = torch.ops.aten


_METHODS = {
    "copy_": aten.copy_.default,
    "narrow": aten.narrow.default,
    "select": aten.select.int,
    "transpose": aten.transpose.int,
    "t": aten.t.default,
    "unsqueeze": aten.unsqueeze.default,
}


def spell_out_indexing(graph: fx.Graph) -> None:
    """Replace basic indexing of tensors, reads and assignments, in place; the methods that torch.export would spell so too."""
    for node in list(graph.nodes):
        operator_of = _METHODS.get(str(node.target)) if node.op == "call_method" else None
        if operator_of is not None and not node.kwargs and _is_tensor(node.all_input_nodes[0]):
            with graph.inserting_before(node):
                new = _call(graph, node, operator_of, node.args)
            new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            continue
        if node.op != "call_function" or node.target not in (operator.getitem, operator.setitem):
            continue
        steps = _steps(node)
        if steps is None:
            _spell_out_rows(graph, node)
            continue
        with graph.inserting_before(node):
            part = _view(graph, node, steps)
            if node.target is operator.getitem:
                part.meta["val"] = node.meta["val"]  # it shares memory with what it was taken from
                node.replace_all_uses_with(part)
            else:
                _assign(graph, node, part)
        graph.erase_node(node)


def _steps(node: fx.Node) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """The view operations of a basic index, each with its arguments behind the tensor; None for anything else."""
    source, index = node.args[:2]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or (node.target is operator.getitem and not _is_tensor(node)):
        return None
    entries = list(index) if isinstance(index, tuple) else [index]
    if not all(entry is None or entry is ... or _is_number(entry) or isinstance(entry, slice) for entry in entries):
        return None
    named = sum(entry is not None and entry is not ... for entry in entries)
    if entries.count(...) == 0:
        entries.append(...)
    axis = 0
    steps: list[tuple[Any, tuple[Any, ...]]] = []
    for entry in entries:
        if entry is ...:
            axis += value.dim() - named
        elif entry is None:
            steps.append((aten.unsqueeze.default, (axis,)))
            axis += 1
        elif isinstance(entry, slice):
            if entry != slice(None):
                end = sys.maxsize if entry.stop is None else entry.stop
                steps.append((aten.slice.Tensor, (axis, entry.start or 0, end, entry.step or 1)))
            axis += 1
        else:
            steps.append((aten.select.int, (axis, entry)))
    return steps


def _spell_out_rows(graph: fx.Graph, node: fx.Node) -> None:
    """`x[:, rows]` and `x[:, rows] = v` as `index` and `index_put_`, in place; anything else stays."""
    rows = _rows(node)
    if rows is None:
        return
    with graph.inserting_before(node):
        rows = [_literal(graph, node, row) if isinstance(row, list) else row for row in rows]
        if node.target is operator.getitem:
            new = graph.call_function(aten.index.Tensor, (node.args[0], rows))
        else:
            new = graph.call_function(aten.index_put_.default, (node.args[0], rows, node.args[2]))
    new.meta = {**node.meta, "val": node.meta["val"] if _is_tensor(node) else node.args[0].meta["val"]}  # type: ignore[union-attr]
    node.replace_all_uses_with(new)
    graph.erase_node(node)


def _literal(graph: fx.Graph, node: fx.Node, row: list[int]) -> fx.Node:
    device = node.args[0].meta["val"].device  # type: ignore[union-attr]
    new = graph.call_function(torch.tensor, (row,), {"device": device})
    new.meta = {**node.meta, "val": node.args[0].meta["val"].new_empty(len(row), dtype=torch.int64)}  # type: ignore[union-attr]
    return new


def _rows(node: fx.Node) -> list[fx.Node | list[int] | None] | None:
    """The index of each axis, None where it is taken whole; None where the index is made of anything but these."""
    source, index = node.args[:2]
    entries = list(index) if isinstance(index, tuple) else [index]
    tensors = [entry for entry in entries if _is_row(entry)]
    whole = [entry for entry in entries if isinstance(entry, slice) and entry == slice(None)]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not tensors or len(tensors) + len(whole) != len(entries):
        return None
    if node.target is operator.setitem and not _fits(node.args[2], value):
        return None
    found: list[Any] = [None if isinstance(entry, slice) else entry for entry in entries]
    return found


def _is_row(entry: Any) -> bool:
    if isinstance(entry, list):
        return bool(entry) and all(type(number) is int for number in entry)
    return isinstance(entry, fx.Node) and _is_tensor(entry)


def _fits(new: Any, value: torch.Tensor) -> bool:
    """Does `index_put_` take the value as an assignment does, which also casts numbers and drops leading axes of size one?"""
    return isinstance(new, fx.Node) and _is_tensor(new) and bool(new.meta["val"].dim() <= value.dim())


def _is_number(entry: Any) -> bool:
    """An int, or a node that is a symbolic one; True and False index like masks."""
    if isinstance(entry, fx.Node):
        return isinstance(entry.meta.get("val"), (int, torch.SymInt))
    return isinstance(entry, int) and not isinstance(entry, bool)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _view(graph: fx.Graph, node: fx.Node, steps: list[tuple[Any, tuple[Any, ...]]]) -> fx.Node:
    part = node.args[0]
    assert isinstance(part, fx.Node)
    for target, args in steps or [(aten.alias.default, ())]:
        part = _call(graph, node, target, (part, *args))
    return part


def _assign(graph: fx.Graph, node: fx.Node, part: fx.Node) -> None:
    value = node.args[2]
    if isinstance(value, fx.Node) and _is_tensor(value):
        _call(graph, node, aten.copy_.default, (part, value))
    else:
        _call(graph, node, aten.fill_.Scalar, (part, value))


def _call(graph: fx.Graph, node: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    new = graph.call_function(target, args)
    new.meta = {key: value for key, value in node.meta.items() if key not in ("val", "example_value")}
    written = target in (aten.copy_.default, aten.fill_.Scalar)
    new.meta["val"] = args[0].meta["val"] if written else fake_result(new)
    return new
