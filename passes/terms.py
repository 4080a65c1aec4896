"""The update `u` of an event as one graph value of the stream's shape."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from resfx.passes import ops
from resfx.passes.editor import Editor, carrying_path, value_of
from resfx.passes.layouts import same_shape
from resfx.passes.masks import mask_of
from resfx.patterns.places import joined_into
from resfx.patterns.streams import Event, Side, Site, Term, Write


def term_nodes(event: Write | Side) -> frozenset[Node]:
    """The operands of the event's terms, which are not part of the stream itself."""
    terms = event.site.terms if isinstance(event, Write) else event.terms
    return frozenset(node for term in terms for node in term.operands)


def opaque_nodes(event: Event) -> frozenset[Node]:
    """The nodes that a path through the event must not enter: terms, a mask, and what the state was joined with."""
    if isinstance(event, Write | Side):
        return term_nodes(event)
    joined = joined_into(event.before, event.after)
    return mask_of(event) | frozenset(joined.all_input_nodes if joined is not None else ()) - {event.before}


def event_path(before: Node, event: Event) -> list[Node]:
    """The nodes that carry the state through the event, from `before` (what it starts from now) on."""
    return carrying_path(before, event.after, opaque_nodes(event))


def has_plain_skip(site: Site) -> bool:
    """Whether the sum takes the state as it is, without a factor."""
    return not isinstance(site.skip_scale, Node) and site.skip_scale == 1


def update_of(editor: Editor, event: Write | Side, path: list[Node], before: Node, state: Node) -> Node:
    """u of `event`, in the shape of `state` (the value that is updated). A plain `h + u` gives u's own node.

    `path` are the nodes that carry the state through the event, from `before` on.
    """
    region = event.site.region if isinstance(event, Write) else event.region
    if region:
        # Zeros with the slice updated: the event's own nodes, run on zeros. So every spelling of a slice is understood.
        return editor.copy(path, {before: editor.call(ops.zeros_like, state)})
    terms = event.site.terms if isinstance(event, Write) else event.terms
    update = _sum(editor, terms)
    if same_shape(value_of(update).shape, value_of(state).shape):
        return update
    return editor.call(ops.expand_like, update, state)


def _sum(editor: Editor, terms: Sequence[Term]) -> Node:
    total: Node | None = None
    for term in terms:
        negative = term.scale == -1.0
        value = _operand(editor, term, negative and total is not None)
        if total is None:
            total = value
        elif negative:
            total = editor.call(ops.subtract, total, value)
        else:
            total = editor.call(ops.add, [total, value])
    assert total is not None  # apply refuses a site without terms before any edit
    return total


def _operand(editor: Editor, term: Term, sign_apart: bool) -> Node:
    value = term.operands[0]
    if term.op != "value":
        value = editor.call(ops.product, term.op, *term.operands)
    if sign_apart or (isinstance(term.scale, float | int) and term.scale == 1):
        return value
    return editor.call(ops.scale, value, term.scale)
