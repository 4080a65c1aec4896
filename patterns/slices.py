"""Updates of a part of the state: `x[:, :1] += f(x)` and `cat([x[:, :1], x[:, 1:] + f(x)])`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch.fx import Node

from resfx.patterns.dialect import ACTIVATION, CAST, NORM, SLICE, SPLIT, op_name, same_shape
from resfx.patterns.facts import identity_operand
from resfx.patterns.places import is_open_end, is_whole_slice, pieces_of, place_of, same_place, whole_slices
from resfx.patterns.sums import terms_of

_PART_STEPS = NORM | ACTIVATION | CAST | {"slice"}


def slice_base(node: Node) -> Node | None:
    """What a slice, select, narrow or one piece of a split was taken from."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if op_name(node) in SLICE:
        return source
    if op_name(node) == "getitem" and op_name(source) in SPLIT and isinstance(source.args[0], Node):
        return source.args[0]
    return None


def parts_of(whole: Node) -> set[Node]:
    """The slices and splits of a value, and of its casts, copies and views."""
    found: set[Node] = set()
    todo = [whole]
    while todo:
        for user in todo.pop().users:
            if identity_operand(user) is not None:
                todo.append(user)
            elif op_name(user) in SLICE or op_name(user) in SPLIT:
                found.add(user)
    return found


def same_source(left: Node, right: Node) -> bool:
    """Are these two different parts of one value?"""
    a, b = slice_base(strip(left)), slice_base(strip(right))
    return a is not None and b is not None and strip(a) is strip(b) and left is not right


def strip(node: Node) -> Node:
    """`node` without casts, copies and views."""
    operand = identity_operand(node)
    while operand is not None:
        node, operand = operand, identity_operand(operand)
    return node


def rebuilt_whole(add: Node, region: tuple[Node, ...], in_place: bool = False) -> Node | None:
    """The value that holds the whole state again after its part `region` became `add`; None where nothing puts it back.

    `in_place`: only one of the same size, in which every part lies where it lay before.
    """
    current: Node | None = add
    for part in reversed(region):
        if current is None:
            return None
        current = next((whole for user in current.users if (whole := _put_back(user, part, current, in_place))), None)
    return current


def _put_back(user: Node, part: Node, updated: Node, in_place: bool) -> Node | None:
    if identity_operand(user) is updated:
        return next((whole for u in user.users if (whole := _put_back(u, part, user, in_place))), None)
    name = op_name(user)
    if name in ("slice_scatter", "select_scatter"):
        return user if _scatters(user, part, updated) else None
    if name == "cat":
        joins = _joins_again(user, part, updated) if in_place else _concatenates(user, part, updated)
        return user if joins else None
    return None


def _scatters(user: Node, part: Node, updated: Node) -> bool:
    base = slice_base(part)
    if base is None or len(user.args) < 2 or user.args[1] is not updated or not isinstance(user.args[0], Node):
        return False
    return strip(user.args[0]) is strip(base) and _where(user.args[2:]) == _where(part.args[1:])


def _where(args: tuple[object, ...]) -> tuple[object, ...]:
    """(dim, start, end, step) with the defaults filled in, or (dim, index) of a select; None is where an end is left open."""
    given = dict(enumerate(args))
    dim, start, end, step = (given.get(i, default) for i, default in enumerate((0, None, None, 1)))
    return dim, start or 0, None if is_open_end(end) else end, step


def _concatenates(user: Node, part: Node, updated: Node) -> bool:
    """Another piece of the `cat` is a part of the same state; pieces that are new only make the state larger."""
    base = slice_base(part)
    pieces = list(_pieces(user))
    if base is None or pieces.count(updated) != 1:
        return False
    return any(
        (source := slice_base(strip(p))) is not None and strip(source) is strip(base)
        for p in pieces
        if p is not updated
    )


def _joins_again(cat: Node, part: Node, updated: Node) -> bool:
    whole = _joined(cat, lambda piece: part if piece is updated else _part_behind(piece))
    base = slice_base(part)
    return whole is not None and base is not None and strip(whole) is strip(base)


def _part_behind(piece: Node) -> Node | None:
    """The part that `piece` is, behind casts, copies and views."""
    node: Node | None = piece
    while node is not None and place_of(node) is None:
        node = identity_operand(node)
    return node


def _joined(cat: Node, part_behind: Callable[[Node], Node | None]) -> Node | None:
    """The value whose parts `cat` joins again, all of them in their places; `part_behind` tells of which part a piece was made."""
    whole: Node | None = None
    for piece, at in pieces_of(cat):
        part = part_behind(piece)
        place = place_of(part) if part is not None else None
        if place is None or not same_place(place, at):
            return None
        if whole not in (None, place.base):
            return None
        whole = place.base
    return whole if whole is not None and same_shape(whole, cat) else None


def parts_in_place(cat: Node) -> tuple[Node, list[Node]] | None:
    """(the value, the nodes after it up to `cat`) where `cat` joins all parts of one value again, each in its place.

    A norm, an activation or a cast may have worked on a part: `cat([norm(x[:, :1]), x[:, 1:]], 1)`.
    """
    nodes: dict[Node, None] = {}
    whole = _joined(cat, lambda piece: _unary_source(piece, nodes))
    return None if whole is None else (whole, [*nodes, cat])


def added_to_part(joined: Node) -> tuple[Node, Node, Node] | None:
    """(the value, the sum, the part) where `joined` is the value again after something was added to a part of it."""
    updated = [piece for piece, _ in pieces_of(joined)] or list(joined.all_input_nodes[1:2])
    for add in map(strip, updated):
        for term in terms_of(add) or ():
            part = strip(term.operands[0])
            base = slice_base(part)
            if base is None or term.op != "value" or term.scale != 1 or not same_shape(part, add):
                continue
            if rebuilt_whole(add, (part,), in_place=True) is joined:
                return base, add, part
    return None


def _unary_source(piece: Node, passed: dict[Node, None]) -> Node | None:
    """The part that `piece` was made of by norms, activations and casts; those, the part and what it was taken from go into `passed`."""
    node: object = piece
    while isinstance(node, Node):
        passed[node] = None
        base = None if is_whole_slice(node) else slice_base(node)
        if base is not None:
            passed.update(dict.fromkeys(n for n in node.all_input_nodes if op_name(n) in SPLIT))
            passed.update(dict.fromkeys(whole_slices(base)))
            return node
        if op_name(node) not in _PART_STEPS:
            return None
        node = node.args[0] if node.args else None
    return None


def _pieces(cat: Node) -> Iterator[Node]:
    listed = cat.args[0] if cat.args else ()
    for piece in listed if isinstance(listed, (list, tuple)) else ():
        if isinstance(piece, Node) and op_name(piece) == "cat":
            yield from _pieces(piece)
        elif isinstance(piece, Node):
            yield piece
