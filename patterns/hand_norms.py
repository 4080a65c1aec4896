"""Norms written by hand, told from pooling: a norm divides what it took the statistic of by that statistic.

x * rsqrt(x.square().mean(-1))     a norm over the last axis
x + f(x.mean(1))                   the mean over the tokens goes into a map: nothing is normalised
x * sigmoid(f(x.mean(1)))          nor here
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterator

from torch.fx import Node

from resfx.patterns.dialect import CAST, EXPAND, LAYOUT, NORM_PARTS, data_inputs, op_name

_FOLLOWED = NORM_PARTS | CAST | EXPAND | LAYOUT
_MOST = 64  # nodes looked at: a norm has some ten


def is_divided_by(statistic: Node, values: Container[Node]) -> bool:
    """Is one of `values`, or what pointwise operations make of it, divided by the statistic or by what they make of that?"""
    made = _made_of(statistic)
    degrees = {statistic: 1.0}  # with which power the statistic enters
    for node in sorted(made - {statistic}):
        degrees[node] = _degree(node, degrees)
        for divisor in _divisors(node, degrees):
            others = (i for i in data_inputs(node) if i is not divisor and i is not statistic)
            if any(n in values for other in others for n in _sources(other, made)):
                return True
    return False


def _made_of(statistic: Node) -> set[Node]:
    """What pointwise operations and further statistics make of it, the nearest first."""
    made, todo = {statistic}, deque([statistic])
    while todo and len(made) < _MOST:
        for user in todo.popleft().users:
            if user not in made and op_name(user) in _FOLLOWED:
                made.add(user)
                todo.append(user)
    return made


def _degree(node: Node, degrees: dict[Node, float]) -> float:
    name, powers = op_name(node), [degrees.get(i, 0.0) if isinstance(i, Node) else 0.0 for i in node.args]
    if name in ("mul", "div"):
        return powers[0] + (powers[1] if name == "mul" else -powers[1])
    if name == "pow":
        return powers[0] * node.args[1] if isinstance(node.args[1], (int, float)) else 0.0
    if name in ("sqrt", "rsqrt", "reciprocal", "square"):
        return powers[0] * {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0, "square": 2.0}[name]
    return max((degrees.get(i, 0.0) for i in data_inputs(node)), key=abs, default=0.0)


def _divisors(node: Node, degrees: dict[Node, float]) -> list[Node]:
    """The operands by which a product or a quotient divides."""
    if op_name(node) not in ("mul", "div"):
        return []
    signs = (1, 1 if op_name(node) == "mul" else -1)
    pairs = zip(node.args, signs, strict=False)
    return [i for i, sign in pairs if isinstance(i, Node) and sign * degrees.get(i, 0.0) < 0]


def _sources(node: Node, made: Collection[Node]) -> Iterator[Node]:
    """The node and what pointwise operations made it of, apart from what was made of the statistic."""
    seen, todo = {node}, [node]
    while todo and len(seen) < _MOST:
        node = todo.pop()
        yield node
        inputs = data_inputs(node) if op_name(node) in _FOLLOWED else ()
        for i in inputs:
            if i not in seen and i not in made:
                seen.add(i)
                todo.append(i)
