"""`loops=K`: the body of a stream becomes one submodule, which is called K times on its own result.

The submodule holds no parameters. The user's modules and parameters are attributes of the model, as before, and reach it as
arguments of the call: so no name of the state_dict changes, and a module that is replaced later (LoRA, quantization) is used.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from resfx.passes import ops
from resfx.passes.autocast import write_as_blocks
from resfx.passes.body import Body, body_of, graph_of
from resfx.passes.editor import Editor
from resfx.passes.errors import EditError
from resfx.passes.parameters import subtree

# What a scaled write reads: how often the body it stands in runs.
_COUNTING = (ops.scaled_write, ops.learned_scaled_write)
_CARRIED_META = ("stack_trace", "nn_module_stack", "custom", "val")


class Repeat(nn.Module):
    """Calls `body` `count` times, each time on the state that it returned before; everything else stays the same."""

    count: int

    def __init__(self, body: GraphModule, count: int) -> None:
        super().__init__()
        self.body = body
        self.count = count

    def forward(self, outer: int, state: Tensor, *others: Any) -> tuple[Any, ...]:
        """`outer`: how often the enclosing bodies run. Returns the last state and the last repeat's mid-stream values."""
        taps: Sequence[Any] = ()
        for _ in range(self.count):
            state, *taps = self.body(outer * self.count, state, *others)
        return state, *taps

    def extra_repr(self) -> str:
        return f"loops={self.count}"


def repeat_path(prefix: str, stream: int) -> str:
    """Where the `Repeat` of a stream lives."""
    return f"{prefix}.{stream}.loop"


def cut_out(editor: Editor, entry: Node, end: Node, path: str, count: int) -> Repeat:
    """Replace the body between `entry` and `end` by one call of a `Repeat` at `path`. Errors: EditError."""
    body = body_of(entry, end)
    if not body.nodes or body.nodes[-1] is not end:
        raise EditError(f"nothing leads from {entry.name} to {end.name}")
    for node in reversed(body.late):
        end.append(node)
    modules = _module_nodes(editor, body)
    graph, copies = graph_of(body, modules)
    _count_loops(editor.graph_module, copies, next(iter(graph.nodes)))
    write_as_blocks(graph)
    repeat = Repeat(GraphModule(nn.Module(), graph, "StreamBody"), count)
    folder, _, leaf = path.rpartition(".")
    subtree(editor.graph_module, folder, path).add_module(leaf, repeat)
    with editor.graph.inserting_before(end):
        call = editor.graph.call_module(path, (1, entry, *body.inputs, *modules.values()))
    _read_from(editor, body, call)
    for node in reversed(body.nodes):
        editor.graph.erase_node(node)
        editor.emitted.pop(node, None)
    return repeat


def _module_nodes(editor: Editor, body: Body) -> dict[str, Node]:
    """Nodes that hold the modules which the body calls, by path."""
    found: dict[str, Node] = {}
    paths = dict.fromkeys(str(node.target) for node in body.nodes if node.op == "call_module")
    for path in paths:
        with editor.graph.inserting_before(body.end):
            found[path] = editor.graph.get_attr(path)
        found[path].meta["val"] = None
    return found


def _count_loops(graph_module: GraphModule, copies: dict[Node, Node], loops: Node) -> None:
    """Scaled writes, and repeats inside this one, learn how often the body runs."""
    for node, copy in copies.items():
        if copy.op == "call_function" and copy.target in _COUNTING:
            copy.kwargs = {**copy.kwargs, "loops": loops}
        elif node.op == "call_module" and isinstance(graph_module.get_submodule(str(node.target)), Repeat):
            copy.update_arg(1, loops)


def _read_from(editor: Editor, body: Body, call: Node) -> None:
    """Who read the end or a value in the middle reads it from the call."""
    inside = set(body.nodes)
    results = (body.end, *body.taps)
    call.meta = {key: body.end.meta[key] for key in _CARRIED_META if key in body.end.meta}
    call.meta["val"] = tuple(node.meta.get("val") for node in results)
    point = call
    for index, node in enumerate(results):
        with editor.graph.inserting_after(point):
            value = editor.graph.call_function(operator.getitem, (call, index))
        value.meta = {key: node.meta[key] for key in _CARRIED_META if key in node.meta}
        node.replace_all_uses_with(value, delete_user_cb=lambda user: user not in inside)
        point = value
