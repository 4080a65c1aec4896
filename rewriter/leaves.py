"""Which submodules become leaves: the largest ones that hold no site."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import fx, nn

from resfx.patterns.dialect import call_entries


def called_paths(graph: fx.Graph) -> set[str]:
    """Module paths that left a trace in the graph."""
    return {path for node in graph.nodes for path, _ in call_entries(node)}


def branch_owners(graph: fx.Graph) -> set[str]:
    """Modules called inside the branches of cond, scan, ... that run outside of them: never leaves.

    Their call can't be seen in the graph; it is known by the parameters that the op takes.
    """
    found = set()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        around = {path for path, _ in call_entries(node)}
        for source in node.all_input_nodes:
            owner = str(source.target).rpartition(".")[0] if source.op == "get_attr" else ""
            while owner and owner not in around:
                found.add(owner)
                owner = owner.rpartition(".")[0]
    return found


def leaf_paths(model: nn.Module, open_paths: Iterable[str], graph: fx.Graph) -> list[str]:
    """Every maximal submodule that is not open and holds no open one, under all of its names.

    A container that is never called itself (ModuleList, or a module used through another method) is walked through.
    """
    called = called_paths(graph)
    opened = {id(model.get_submodule(path)) for path in open_paths}
    holds_open = {id(module) for module in model.modules() if any(id(inner) in opened for inner in module.modules())}
    leaves = list(_walk(model, "", holds_open, called))
    return leaves + [
        path for path in _called_from_outside(graph, leaves) if id(model.get_submodule(path)) not in holds_open
    ]


def _called_from_outside(graph: fx.Graph, leaves: list[str]) -> list[str]:
    """Submodules of leaves that someone else calls, such as `block.norm` in `x + block(block.norm(x))`: leaves of their own."""
    known = set(leaves)
    found: dict[str, None] = {}
    for node in graph.nodes:
        around: set[str] = set()
        for path, _ in call_entries(node):
            owner = _leaf_above(path, known)
            if owner is None or path == owner or owner in around:
                around.add(path)
                continue
            found[path] = None
            break
    return list(found)


def _leaf_above(path: str, leaves: set[str]) -> str | None:
    """The leaf that is `path` or holds it."""
    while path:
        if path in leaves:
            return path
        path = path.rpartition(".")[0]
    return None


def _walk(module: nn.Module, prefix: str, holds_open: set[int], called: set[str]) -> Iterator[str]:
    for name, child in module._modules.items():
        if child is None:
            continue
        path = f"{prefix}.{name}" if prefix else name
        if id(child) not in holds_open and _is_called(child, path, called):
            yield path
            continue
        yield from _walk(child, path, holds_open, called)


def _is_called(module: nn.Module, path: str, called: set[str]) -> bool:
    if path in called:
        return True
    if type(module).forward is nn.Module.forward:
        return False
    # No trace of it: it may do something in train mode only, unless it is used through its children.
    return not any(other.startswith(path + ".") for other in called)
