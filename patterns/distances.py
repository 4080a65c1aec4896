"""Differences of which only the size is read, as in a loss: `(f(x) - x) ** 2`. No state goes on into a distance."""

from __future__ import annotations

from torch.fx import Node

from resfx.patterns.dialect import op_name
from resfx.patterns.facts import identity_operand
from resfx.patterns.readings import data_users
from resfx.patterns.streams import Term

_EVEN = frozenset("abs square norm linalg_vector_norm vector_norm".split())


def is_distance(node: Node, terms: list[Term]) -> bool:
    """Is the sum of these terms the difference of two values, read for its size alone?"""
    return len(terms) == 2 and {term.scale for term in terms} == {1, -1} and _only_size_is_read(node)


def _only_size_is_read(node: Node) -> bool:
    users = data_users(node)
    return bool(users) and all(
        _is_even(user) or (identity_operand(user) is node and _only_size_is_read(user)) for user in users
    )


def _is_even(node: Node) -> bool:
    """Does the operation give the same for a value and its negative?"""
    name = op_name(node)
    if name == "mul":
        return len(node.args) == 2 and node.args[0] is node.args[1]
    return name in _EVEN or (name == "pow" and node.args[1] in (2, 4))
