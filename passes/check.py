"""What must hold for every rewritten graph: small named rules, run after every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.fx import Node
from torch.utils import _pytree as pytree

from resfx.passes.editor import Editor, Replacement, value_of
from resfx.passes.errors import CheckError
from resfx.passes.layouts import same_shape

Rule = Callable[[Editor, Sequence[str]], None]


def check(editor: Editor, parameters: Sequence[str]) -> None:
    """Run every rule on the graph. `parameters` are the names of those the rewrite added. Errors: CheckError."""
    for rule in RULES:
        rule(editor, parameters)


def well_formed(editor: Editor, parameters: Sequence[str]) -> None:
    """Every node is defined before its use and every attribute it names exists."""
    try:
        editor.graph.lint()
    except RuntimeError as e:
        raise CheckError("well_formed", "the graph", str(e)) from e


def values_kept(editor: Editor, parameters: Sequence[str]) -> None:
    """Every new node has an example value."""
    for node in editor.emitted:
        if "val" not in node.meta:
            raise CheckError("values_kept", node.name, "it has no example value")


def same_inputs(editor: Editor, parameters: Sequence[str]) -> None:
    """Every reader gets a value of the shape and dtype that it had before; several of them where it reads a split."""
    for replacement in editor.replacements:
        leaves = [pytree.tree_leaves(value_of(node)) for node in (replacement.old, replacement.new)]
        for old, new in zip(*leaves, strict=True):
            _same_input(replacement, old, new)


def _same_input(replacement: Replacement, old: Any, new: Any) -> None:
    if not same_shape(old.shape, new.shape):
        detail = f"{replacement.user.name} read shape {tuple(old.shape)}, now {tuple(new.shape)}"
        raise CheckError("same_inputs", replacement.new.name, detail)
    if old.dtype != new.dtype:
        detail = f"{replacement.user.name} read {old.dtype}, now {new.dtype}"
        raise CheckError("same_inputs", replacement.new.name, detail)


def parameters_used(editor: Editor, parameters: Sequence[str]) -> None:
    """Every parameter that was added reaches an output."""
    live = _reaching_output(editor)
    used = {str(node.target) for node in live if node.op == "get_attr"}
    own = {name for name, _ in editor.graph_module.named_parameters(remove_duplicate=False)}
    for name in parameters:
        if name in own and name not in used:
            raise CheckError("parameters_used", name, "no output depends on this parameter")


def nothing_dead(editor: Editor, parameters: Sequence[str]) -> None:
    """No node that a pass made is left without a reader."""
    for node in editor.emitted:
        if not node.users and not node.is_impure():
            raise CheckError("nothing_dead", node.name, "nothing reads it")


def _reaching_output(editor: Editor) -> set[Node]:
    live: set[Node] = set()
    waiting: list[Node] = [node for node in editor.graph.nodes if node.op == "output"]
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting.extend(_inputs(node))
    return live


def _inputs(node: Node) -> Iterable[Node]:
    return node.all_input_nodes


RULES: tuple[Rule, ...] = (well_formed, values_kept, same_inputs, parameters_used, nothing_dead)
