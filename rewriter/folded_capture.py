"""The second capture: leaves folded, train and eval alive."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

from resfx.calling import CallCodeGen
from resfx.capture_errors import CaptureError
from resfx.captured import Captured, Mode
from resfx.changed_arguments import changing_modules
from resfx.eager_calls import refuse_unfolded
from resfx.export_capture import export_flat
from resfx.fold import fold, sift
from resfx.fx_route import fx_flat
from resfx.graphed import TRAIN_REFUSAL
from resfx.inert import handed_back, moved, read_outside
from resfx.leaves import branch_owners, called_paths, leaf_paths
from resfx.mode_differences import Difference, ModesDiffer, compare, equal_outputs, leaf_test, twin_calls
from resfx.modes import join_modes
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
    flat.changing = changing_modules(model, args, kwargs)
    captured, reason = _in_train_mode(model, args, kwargs, flat, opened)
    if captured is not None:
        hook(captured)
        try:
            both = _both_modes(model, args, kwargs, flat, opened, captured)
            refuse_unfolded(both.captured.graph)
            return both
        except ModesDiffer as error:
            reason = str(error)
    captured = _export_in(model, args, kwargs, flat, opened, "eval")
    hook(captured)
    mapping = fold(captured)
    refuse_unfolded(captured.graph)
    captured.notes.append(f"eval mode only: {reason}")
    captured.graph_module.meta[TRAIN_REFUSAL] = reason
    captured.graph_module.training = False
    _merge_guards(captured, flat)
    return Folded(captured, mapping)


def _in_train_mode(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], flat: Captured, opened: set[str]
) -> tuple[Captured | None, str]:
    """The capture in train mode, or None and why there is none."""
    try:
        captured = _export_in(model, args, kwargs, flat, opened, "train")
    except CaptureError as error:
        return None, f"train mode does not trace ({_reason_and_line(error)})"
    if captured.signature.out_spec != flat.signature.out_spec:
        return None, "the model's outputs have another structure in train mode than in eval mode"
    return captured, ""


def _reason_and_line(error: CaptureError) -> str:
    """The first line of the message, and the model's source line where it names one."""
    reason, *more = str(error).splitlines()
    return " ".join([reason, *(line.strip() for line in more[:1] if line.startswith("  at "))])


def _both_modes(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    flat: Captured,
    opened: set[str],
    captured: Captured,
) -> Folded:
    """Fold the train capture and let its glue follow `.training`. Raises ModesDiffer."""
    difference, evaluation = _flat_difference(captured, flat), flat
    back = handed_back(captured.graph)
    mapping = fold(captured)
    if difference is None:
        evaluation = _export_in(model, args, kwargs, flat, opened, "eval")
        eval_back = handed_back(evaluation.graph)
        back = moved(back, mapping) | moved(eval_back, fold(evaluation))
        equal = equal_outputs(captured.calls, evaluation.calls)
        twins = twin_calls(captured.graph, evaluation.calls)
        difference = compare(captured.graph, evaluation.graph, lambda node: False, equal, back, twins)
    switched = join_modes(captured.graph_module, difference, evaluation.graph_module, model.training)
    mapping = {old: switched.get(new, new) for old, new in mapping.items()} | switched
    captured.graph_module.training = model.training
    if switched:
        captured.notes.append(f"{len(switched)} values of the glue differ between train and eval and follow .training")
    _merge_guards(captured, flat)
    return Folded(captured, mapping)


def _flat_difference(captured: Captured, flat: Captured) -> Difference | None:
    """The differences of the glue by the flat graphs alone; None where that takes the folded eval graph.

    The flat graphs are enough where every difference is a constant of one operation (a dropout's flag).
    """
    in_leaf = leaf_test({(call.path, call.index) for call in captured.calls})
    back = handed_back(captured.graph) | handed_back(flat.graph)
    difference = compare(captured.graph, flat.graph, in_leaf, (), back, {})
    unpaired = [node for node in captured.graph.nodes if node not in difference.to_eval and not in_leaf(node)]
    twins = set(difference.to_eval.values())
    eval_only = [node for node in flat.graph.nodes if node not in twins and not in_leaf(node)]
    if any(in_leaf(a) or in_leaf(b) for a, b in difference.selections):
        return None
    if len(unpaired) != len(eval_only) or any(a.target != b.target for a, b in zip(unpaired, eval_only, strict=True)):
        return None
    around = [n for node in (*unpaired, *eval_only) for n in (*node.all_input_nodes, *node.users)]
    return None if any(in_leaf(n) for n in around) else difference


def _export_in(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], flat: Captured, opened: set[str], mode: Mode
) -> Captured:
    """Export with the leaves' call signatures kept.

    A leaf whose signature can't be kept, or that can't be folded, is opened where it has modules of its own: they are leaves then.
    """
    called = called_paths(flat.graph)
    while True:
        captured = _export_leaves(model, args, kwargs, flat, opened, mode)
        refused = sift(captured)
        inner = {path for path in refused if any(other.startswith(path + ".") for other in called)} - opened
        if not inner:
            return captured
        opened |= inner


def _export_leaves(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], flat: Captured, opened: set[str], mode: Mode
) -> Captured:
    if flat.frontend == "fx":
        wanted = set(_leaves(model, flat, opened))
        traced = fx_flat(model, args, kwargs, mode)
        traced.calls = [call for call in traced.calls if call.path in wanted]
        return traced
    while True:
        leaves = _leaves(model, flat, opened)
        try:
            exported = export_flat(model, args, kwargs, None, mode, leaves, flat.attempt)
        except CaptureError as error:
            culprit = _culprit(error, set(leaves))
            if culprit is None:
                raise
            kind = type(model.get_submodule(culprit))
            opened |= {path for path in leaves if type(model.get_submodule(path)) is kind}
            continue
        calls = module_calls(exported.program, exported.unlifted, leaves)
        exported.captured.calls = read_outside(exported.captured.graph, calls)
        return exported.captured


def _leaves(model: nn.Module, flat: Captured, opened: set[str]) -> list[str]:
    """The maximal submodules outside `opened`; those that change their arguments are opened as well."""
    while True:
        leaves = leaf_paths(model, opened, flat.graph)
        changing = {path for path in leaves if id(model.get_submodule(path)) in flat.changing}
        if not changing:
            return leaves
        opened |= changing


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
