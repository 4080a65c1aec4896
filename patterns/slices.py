"""Updates of a part of the state: `x[:, :1] += f(x)` and `cat([x[:, :1], x[:, 1:] + f(x)])`."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Node

from resfx.patterns.dialect import ACTIVATION, CAST, NORM, SLICE, SPLIT, op_name, same_shape
from resfx.patterns.facts import identity_operand, is_open_end, is_whole_slice

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


def rebuilt_whole(add: Node, region: tuple[Node, ...]) -> Node | None:
    """The value that holds the whole state again after its part `region` became `add`; None where nothing puts it back."""
    current: Node | None = add
    for part in reversed(region):
        if current is None:
            return None
        current = next((whole for user in current.users if (whole := _put_back(user, part, current))), None)
    return current


def _put_back(user: Node, part: Node, updated: Node) -> Node | None:
    if identity_operand(user) is updated:
        return next((whole for u in user.users if (whole := _put_back(u, part, user))), None)
    name = op_name(user)
    if name in ("slice_scatter", "select_scatter"):
        return user if _scatters(user, part, updated) else None
    if name == "cat":
        return user if _concatenates(user, part, updated) else None
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


def parts_in_place(cat: Node) -> tuple[Node, list[Node]] | None:
    """(the value, the nodes after it up to `cat`) where `cat` joins all parts of one value again, each in its place.

    A norm, an activation or a cast may have worked on a part: `cat([norm(x[:, :1]), x[:, 1:]], 1)`.
    """
    whole: Node | None = None
    nodes: list[Node] = []
    position: object = 0
    listed = cat.args[0] if cat.args else ()
    for piece in listed if isinstance(listed, (list, tuple)) else ():
        part = _unary_source(piece, nodes)
        base = slice_base(part) if part is not None else None
        if part is None or base is None or op_name(part) != "slice":
            return None
        dim, start, end, step = _where(part.args[1:])
        if (dim, start, step) != (cat.args[1] if len(cat.args) > 1 else 0, position, 1):
            return None
        source = _without_whole_slices(base, nodes)
        if whole not in (None, source):
            return None
        whole, position = source, end
    if whole is None or position is not None or not same_shape(whole, cat):
        return None
    return whole, [*nodes, cat]


def _unary_source(piece: object, passed: list[Node]) -> Node | None:
    """The slice that `piece` was made of by norms, activations and casts; those and the slice go into `passed`."""
    while isinstance(piece, Node):
        passed.append(piece)
        if op_name(piece) == "slice" and not is_whole_slice(piece):
            return piece
        if op_name(piece) not in _PART_STEPS:
            return None
        piece = piece.args[0] if piece.args else None
    return None


def _without_whole_slices(node: Node, passed: list[Node]) -> Node:
    while is_whole_slice(node) and isinstance(node.args[0], Node):
        passed.append(node)
        node = node.args[0]
    return node


def _pieces(cat: Node) -> Iterator[Node]:
    listed = cat.args[0] if cat.args else ()
    for piece in listed if isinstance(listed, (list, tuple)) else ():
        if isinstance(piece, Node) and op_name(piece) == "cat":
            yield from _pieces(piece)
        elif isinstance(piece, Node):
            yield piece
