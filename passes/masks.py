"""Dropout on the state itself draws one mask, whatever copies of that stretch of the stream a rewrite makes: `R(x)` becomes `x * R(1)`."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import GraphModule, Node
from torch.nn.modules.dropout import _DropoutNd

from resfx.passes import ops
from resfx.passes.editor import Editor
from resfx.patterns.dialect import op_name
from resfx.patterns.streams import Cast, Event

_DROPOUT = frozenset({"dropout", "native_dropout", "feature_dropout"})


def share_mask(editor: Editor, event: Event) -> None:
    """Where `event` is dropout on the state, let it multiply by a mask that its copies read too."""
    node = event.after
    if not isinstance(event, Cast) or node.all_input_nodes != [event.before] or not _draws(editor.graph_module, node):
        return
    editor.place_before(node)
    ones = editor.call(ops.mask_ones, event.before)
    mask = editor.copy([node], {event.before: ones})
    node.op, node.target, node.args, node.kwargs = "call_function", ops.masked, (event.before, mask), {}


def mask_of(event: Event) -> frozenset[Node]:
    """What `share_mask` lets the event multiply by: no path of the state leads through it."""
    shared = isinstance(event, Cast) and event.after.target is ops.masked
    return frozenset(event.after.all_input_nodes) - {event.before} if shared else frozenset()


def _draws(graph_module: GraphModule, node: Node) -> bool:
    """Is it a dropout, or a call of a module that is one or has one inside?"""
    if node.op != "call_module":
        return op_name(node) in _DROPOUT
    module = graph_module.get_submodule(str(node.target))
    return any(isinstance(inner, _DropoutNd) or any(_dropouts(inner)) for inner in module.modules())


def _dropouts(module: object) -> Iterator[Node]:
    if isinstance(module, GraphModule):
        yield from (node for node in module.graph.nodes if op_name(node) in _DROPOUT)
