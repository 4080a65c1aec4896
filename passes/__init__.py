"""What a residual becomes: the forms, the functions they emit, the graph editor and the checks.

Every module of this package that defines a `Form` is a form's file; `FORMS` is built from them, by the forms' names.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from resfx.passes.apply import Applied, apply, apply_all
from resfx.passes.errors import CheckError, EditError, FormError, Refusal
from resfx.passes.form import Form
from resfx.passes.spec import parse
from resfx.passes.walk import Plan


def _discover() -> dict[str, type[Form]]:
    found: dict[str, type[Form]] = {}
    for module in pkgutil.iter_modules(__path__):
        for value in vars(importlib.import_module(f"{__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Form) and value is not Form:
                found[value.name] = value
    return found


FORMS: dict[str, type[Form]] = _discover()


def from_spec(text: str) -> Form:
    """The form written as `text`, e.g. `delta(granularity=block, blocks=4)`. Errors: FormError."""
    return parse(text, FORMS)


_CLASSES = {form.__name__: form for form in FORMS.values()}


def __getattr__(name: str) -> Any:
    """The forms' classes, by name."""
    if name in _CLASSES:
        return _CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_CLASSES])


__all__ = [
    "FORMS",
    "Applied",
    "CheckError",
    "EditError",
    "Form",
    "FormError",
    "Plan",
    "Refusal",
    "apply",
    "apply_all",
    "from_spec",
]
