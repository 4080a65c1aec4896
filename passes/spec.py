"""Forms as text: `delta(granularity=block, blocks=4)` <-> `DeltaAttention(granularity="block", blocks=4)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, get_args, get_origin, get_type_hints

from resfx.passes.errors import FormError
from resfx.passes.form import Form

_SHAPE = re.compile(r"\s*(?P<name>[A-Za-z_]\w*)\s*(?:\((?P<options>.*)\))?\s*", re.DOTALL)


def parse(text: str, registry: Mapping[str, type[Form]]) -> Form:
    """The form that `text` names. Errors: FormError for an unknown form or option, or a value of the wrong type."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise FormError(f"can't read the form {text!r}; write it as name or name(option=value, ..)")
    form = _lookup(match["name"], registry)
    known = {f.name: f for f in fields(form)}
    options: dict[str, Any] = {}
    for part in filter(None, (piece.strip() for piece in (match["options"] or "").split(","))):
        option, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise FormError(f"{form.name}: option {part!r} needs a value, as in {part}=..")
        if option in options:
            raise FormError(f"{form.name}: option {option} is given twice")
        if option not in known:
            valid = ", ".join(known) or "it has none"
            raise FormError(f"{form.name}: unknown option {option!r}; the valid ones: {valid}")
        options[option] = _read(form, known[option], value)
    return form(**options)


def _lookup(name: str, registry: Mapping[str, type[Form]]) -> type[Form]:
    for form in registry.values():
        if name in (form.name, form.__name__):
            return form
    raise FormError(f"unknown form {name!r}; the forms are {', '.join(sorted(registry))}")


def _read(form: type[Form], option: Field[Any], text: str) -> Any:
    """`text` as a value of the option's declared type."""
    text = text.strip("'\"")
    kind = get_type_hints(form)[option.name]
    literal = get_origin(kind) is not None and bool(get_args(kind)) and all(isinstance(a, str) for a in get_args(kind))
    if literal or kind is str:
        return text
    kinds = get_args(kind) or (kind,)
    if type(None) in kinds and text.lower() == "none":
        return None
    for candidate in kinds:
        value = _convert(candidate, text)
        if value is not None:
            return value
    wanted = " or ".join(k.__name__ for k in kinds)
    raise FormError(f"{form.name}: {option.name}={text} is not a value of type {wanted}")


def _convert(kind: type, text: str) -> Any:
    if kind is bool:
        return {"true": True, "false": False, "1": True, "0": False}.get(text.lower())
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return None
    return None
