"""Open sizes: what torch assumed about them, and its expressions as plain Python functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# What sympy prints for the expressions of torch's shape environment, as plain integer functions.
_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": lambda a, b: a // b,
    "CleanDiv": lambda a, b: a // b,
    "CeilDiv": lambda a, b: -(-a // b),
    "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b,
    "ModularIndexing": lambda a, b, c: (a // b) % c,
    "Max": lambda *values: max(values),
    "Min": lambda *values: min(values),
    "Eq": lambda a, b: a == b,
    "Ne": lambda a, b: a != b,
    "Abs": lambda a: abs(a),
    "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b,
    "TruncToInt": lambda a: int(a),
    "FloorToInt": lambda a: int(a // 1),
    "CeilToInt": lambda a: int(-(-a // 1)),
    "ToFloat": lambda a: float(a),
    "Identity": lambda a: a,
    "PowByNatural": lambda a, b: a**b,
    "True": True,
    "False": False,
}
_NAME = re.compile(r"[A-Za-z_]\w*")


def size_function(expression: str, symbols: Sequence[str]) -> Callable[..., Any] | None:
    """`expression`, as sympy prints it, as a Python function of the symbols; None where it uses a function we don't know."""
    if not names_in(expression) <= {*symbols, *_FUNCTIONS}:
        return None
    function: Callable[..., Any] = eval(f"lambda {', '.join(symbols)}: {expression}", dict(_FUNCTIONS))
    return function


def names_in(expression: str) -> set[str]:
    """The symbols and functions that a printed expression names."""
    return set(_NAME.findall(expression))


def readable(expression: str, where: dict[str, str]) -> str:
    """The expression with its symbols replaced: `where` maps a symbol to what the user calls it, as `x.shape[0]`."""
    return _NAME.sub(lambda match: where.get(match.group(), match.group()), expression)


def assumptions(values: Iterable[Any]) -> list[Any]:
    """The boolean expressions that an export of these (fake) inputs relied on, in terms of the symbols that are left.

    `ShapeEnv.guards` and `.replacements` are the one place where torch keeps them; there is no public reader.
    """
    for value in values:
        environment = getattr(getattr(value, "fake_mode", None), "shape_env", None)
        if environment is None:
            continue
        replacements = dict(environment.replacements)
        return [guard.expr.xreplace(replacements) for guard in environment.guards]
    return []
