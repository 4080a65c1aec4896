"""Marks: which value of a graph is which site's state, read or update. They are what `resfx.measure` finds its values by.

A mark is a plain dict (it survives deepcopy, saving and re-export) in `meta["custom"]["resfx_marks"]` of the node that has the value:
`role`, `stream`, `site`, `size` (D, None where the feature axis is unknown), and for a part of an update `term`, `operand`, `op`, `scale`,
`terms` (how many values make up the update) and `slice` (it belongs to a slice of the state).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from torch.fx import Node

from resfx.patterns.streams import Site, Term

MARKS = "resfx_marks"
NOTE = "resfx"
Mark: TypeAlias = dict[str, Any]
Role: TypeAlias = Literal["state", "read", "update", "scale"]


def marks_of(node: Node) -> list[Mark]:
    """The marks of a node; mostly none."""
    return list(node.meta.get("custom", {}).get(MARKS, ()))


def note_of(node: Node) -> dict[str, Any]:
    """Which form made the node, for which site of which stream: what the editor notes. Empty for a node of the model's own."""
    return dict(node.meta.get("custom", {}).get(NOTE, {}))


def put(node: Node, mark: Mark) -> None:
    """Add a mark. The node's `custom` is replaced, for other nodes may share it."""
    custom = node.meta.get("custom", {})
    node.meta["custom"] = {**custom, MARKS: [*custom.get(MARKS, ()), mark]}


def without_marks(custom: dict[str, Any]) -> dict[str, Any]:
    """The `custom` of a node for another node that stands for it: a mark belongs to one value."""
    return {key: value for key, value in custom.items() if key != MARKS}


def update_marks(site: Site, base: Mark) -> list[tuple[Node, Node | None, Mark]]:
    """(value, who reads it, mark) of every operand of the site's update, u = sum of scale * op(*operands)."""
    found: list[tuple[Node, Node | None, Mark]] = []
    whole = {"terms": _count(site), "slice": bool(site.region)}
    for number, term in enumerate(site.terms):
        scale = None if isinstance(term.scale, Node) else float(term.scale)
        for operand, node in enumerate(term.operands):
            what = {"role": "update", "term": number, "operand": operand, "op": term.op, "scale": scale}
            found.append((node, _reader(site, node), {**base, **what, **whole}))
        if isinstance(term.scale, Node):
            found.append((term.scale, None, {**base, "role": "scale", "term": number, **whole}))
    return found


def _count(site: Site) -> int:
    """How many values it takes to know the update."""
    return sum(len(term.operands) + isinstance(term.scale, Node) for term in site.terms)


def _reader(site: Site, operand: Node) -> Node | None:
    """The node of the site's sum that reads `operand`: what it reads in the end is the update, whatever is rewritten later."""
    todo, seen = [site.node], set(term_operands(site.terms))
    while todo:
        node = todo.pop()
        if operand in node.all_input_nodes:
            return node
        seen.add(node)
        todo.extend(i for i in node.all_input_nodes if i not in seen and i is not site.skip)
    return None


def term_operands(terms: tuple[Term, ...]) -> list[Node]:
    """Every operand of a sum's terms."""
    return [operand for term in terms for operand in term.operands]
