"""The second capture: leaves folded, train and eval alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from resfx.calling import CallCodeGen
from resfx.capture_errors import CaptureError
from resfx.captured import Captured, Mode
from resfx.export_capture import Exported, export_flat
from resfx.fold import fold
from resfx.leaves import branch_owners, called_paths, leaf_paths
from resfx.module_calls import module_calls

Hook = Callable[[Captured], None]


@dataclass
class Folded:
    """The folded capture; `mapping` takes nodes of the flat graph that the hook saw to what they are now."""

    captured: Captured
    mapping: dict[fx.Node, fx.Node]


def capture_folded(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flat: Captured,
    open_paths: Iterable[str],
    hook: Hook,
) -> Folded:
    """Capture again with every maximal submodule outside `open_paths` as a leaf, and fold the leaves.

    `hook` sees the second capture's flat graph (with `calls`) before it is folded. Raises CaptureError.
    """
    opened = set(open_paths) | branch_owners(flat.graph)
    exported, leaves = _export_leaves(model, args, kwargs, flat, opened)
    captured = exported.captured
    captured.calls = module_calls(exported.program, exported.unlifted, leaves)
    hook(captured)
    mapping = fold(captured, exported.unlifted.functional)
    _merge_guards(captured, flat)
    return Folded(captured, mapping)


def _export_leaves(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], flat: Captured, opened: set[str]
) -> tuple[Exported, list[str]]:
    try:
        return _export_in(model, args, kwargs, flat, opened, "train")
    except CaptureError as error:
        exported, leaves = _export_in(model, args, kwargs, flat, opened, "eval")
        reason = str(error).splitlines()[0]
        exported.captured.notes.append(f"captured in eval mode only, train mode does not trace: {reason}")
        return exported, leaves


def _export_in(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], flat: Captured, opened: set[str], mode: Mode
) -> tuple[Exported, list[str]]:
    """Export with the leaves' call signatures kept; a leaf whose signature can't be kept is opened."""
    called = called_paths(flat.graph)
    while True:
        leaves = leaf_paths(model, opened, called)
        try:
            return export_flat(model, args, kwargs, None, mode, leaves, flat.attempt), leaves
        except CaptureError as error:
            culprit = _culprit(error, set(leaves))
            if culprit is None:
                raise
            kind = type(model.get_submodule(culprit))
            opened |= {path for path in leaves if type(model.get_submodule(path)) is kind}


def _culprit(error: BaseException, leaves: set[str]) -> str | None:
    """The leaf whose arguments torch could not keep: torch's own hooks hold its path in a local `path`."""
    link: BaseException | None = error
    while link is not None:
        tb = link.__traceback__
        while tb is not None:
            path = tb.tb_frame.f_locals.get("path")
            if isinstance(path, str):
                path = path.removeprefix("_export_root.").partition("@")[0]
                if path in leaves and isinstance(link, AssertionError):
                    return path
            tb = tb.tb_next
        link = link.__cause__ or link.__context__
    return None


def _merge_guards(captured: Captured, flat: Captured) -> None:
    """A call must lie inside of what both captures assumed."""
    guards = captured.signature.guards.merged(flat.signature.guards)
    if guards is captured.signature.guards:
        return
    captured.signature = replace(captured.signature, guards=guards)
    captured.graph.set_codegen(CallCodeGen(captured.signature))
    captured.graph_module.recompile()
