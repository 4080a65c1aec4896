"""A model's return value as a flat list of named tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree  # what torch.export's own documents point to; there is no public name

from resfx.export.call import Path, identifier, key_of, unique_names
from resfx.export.errors import OutputError


@dataclass(frozen=True, eq=False)
class Outputs:
    """The tensors a model returns, named by their place: `logits`, `past_0_1`, `output_0` in a tuple, `output` alone.

    `dropped`: what is no tensor and not None, as `name (type)`.
    """

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    dropped: tuple[str, ...]


def flatten_outputs(value: object) -> Outputs:
    """Flatten dataclasses, mappings, tuples, lists and every container that pytree knows; None is left out.

    Raises OutputError where nothing in it is a tensor.
    """
    leaves = list(_walk((), value))
    tensors = [(path, leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]
    dropped = [f"{_name(path)} ({type(leaf).__name__})" for path, leaf in leaves if not isinstance(leaf, Tensor)]
    if not tensors:
        found = ", ".join(dropped) or "None"
        raise OutputError(f"the model returns no tensor, only {found}: wrap it in a module that returns tensors")
    names = unique_names(_name(path) for path, _ in tensors)
    return Outputs(names, tuple(tensor for _, tensor in tensors), tuple(dropped))


def _name(path: Path) -> str:
    if not path:
        return "output"
    name = identifier(path)
    return name if not name[0].isdigit() else f"output_{name}"


def _walk(path: Path, value: object) -> Iterator[tuple[Path, object]]:
    if value is None:
        return
    children = _children(value)
    if children is None:
        yield path, value
        return
    for key, child in children:
        yield from _walk((*path, key), child)


def _children(value: object) -> list[tuple[Any, Any]] | None:
    """(key, child) pairs of a container, or None for a leaf."""
    if isinstance(value, (Tensor, str)):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    return _pytree_children(value)


def _pytree_children(value: object) -> list[tuple[Any, Any]] | None:
    flat, _ = pytree.tree_flatten_with_path(value, is_leaf=lambda node: node is not value)
    if len(flat) == 1 and flat[0][1] is value:
        return None
    return [("_".join(str(key_of(key)) for key in keys), child) for keys, child in flat]
