"""An example call of a model, flattened: which tensors go in under which names, which values are constants."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # what torch.export's own documents point to; there is no public name

from resfx.export.errors import InputError

Path = tuple[object, ...]
_CONSTANTS = (type(None), bool, int, float, complex, str, enum.Enum, torch.dtype, torch.device, torch.layout)


@dataclass(frozen=True, eq=False)
class Call:
    """`model(*args, **kwargs)` as a flat list of tensors; everything else in it is a constant of the export.

    `names` and `tensors` are parallel: one entry a tensor leaf, in the order of args, then kwargs. A name is the path
    of the leaf, made of the forward's own argument names (`mask`, `past_0_1`). `paths` holds the same unflattened:
    ("past", 0, 1).
    """

    names: tuple[str, ...]
    paths: tuple[Path, ...]
    tensors: tuple[Tensor, ...]
    leaves: tuple[object, ...]
    labels: tuple[str, ...]  # a name for each of `leaves`, constants included
    spec: pytree.TreeSpec
    bound: dict[str, Any]  # forward's argument name -> example value, as torch.export binds them

    def rebuild(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) with `tensors` in the place of the example's."""
        feed = iter(tensors)
        leaves = [next(feed) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return tuple(args), dict(kwargs)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Call:
        """The same call with other tensors of the same ranks, for example of another batch size."""
        feed = iter(tensors)
        leaves = tuple(next(feed) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves)
        return dataclasses.replace(self, tensors=tuple(tensors), leaves=leaves)


def make_call(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Call:
    """Flatten an example call.

    Raises InputError where the arguments do not fit `model.forward` or hold a value that is no tensor, no constant
    and no container that torch knows.
    """
    if isinstance(args, Tensor):
        raise InputError("args must be a tuple: write (x,) for one tensor")
    args, kwargs = tuple(args), dict(kwargs or {})
    signature = inspect.signature(model.forward)
    try:
        bound = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError as error:
        raise InputError(
            f"the example arguments do not fit {type(model).__name__}.forward{signature}: {error}"
        ) from error
    heads = [*_argument_paths(signature, len(args)), *((key,) for key in kwargs)]
    flat, spec = pytree.tree_flatten_with_path((args, kwargs))
    paths = [_leaf_path(keys, heads, list(kwargs)) for keys, _ in flat]
    for path, (_, leaf) in zip(paths, flat, strict=True):
        _check_leaf(path, leaf)
    leaves = _distinct([leaf for _, leaf in flat])
    kept = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, Tensor)]
    return Call(
        names=unique_names([identifier(path) for path, _ in kept]),
        paths=tuple(path for path, _ in kept),
        tensors=tuple(leaf for _, leaf in kept),
        leaves=leaves,
        labels=tuple(map(identifier, paths)),
        spec=spec,
        bound=bound,
    )


def identifier(path: Path) -> str:
    """A path as a name that ONNX and Python take: ("past", 0, "key.1") -> "past_0_key_1"."""
    return re.sub(r"\W", "_", "_".join(str(part) for part in path)) or "value"


def unique_names(names: Iterable[str], taken: Iterable[str] = (), suffix: str = "") -> tuple[str, ...]:
    """The names, each with `suffix` and a number added where it is taken already."""
    used = set(taken)
    result = []
    for name in names:
        candidate, number = name, 1
        while candidate in used:
            candidate = f"{name}{suffix}" if suffix and number == 1 else f"{name}{suffix}_{number}"
            number += 1
        used.add(candidate)
        result.append(candidate)
    return tuple(result)


def key_of(entry: object) -> object:
    """The plain key inside a pytree path entry: an index, a mapping key, or an attribute name."""
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _argument_paths(signature: inspect.Signature, count: int) -> list[Path]:
    paths: list[Path] = []
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return paths + [(parameter.name, i) for i in range(count - len(paths))]
        paths.append((parameter.name,))
    return paths[:count]


def _leaf_path(keys: Sequence[object], heads: list[Path], kwarg_names: list[str]) -> Path:
    side, first, *rest = (key_of(key) for key in keys)
    if side == 0:
        assert isinstance(first, int)
        return (*heads[first], *rest)
    return (first, *rest)


def _distinct(leaves: Sequence[object]) -> tuple[object, ...]:
    """A tensor that is passed twice (tokens that are their own labels) as two inputs: their sizes are not one size."""
    seen: set[int] = set()
    result: list[object] = []
    for leaf in leaves:
        again = isinstance(leaf, Tensor) and id(leaf) in seen
        result.append(leaf.clone() if again and isinstance(leaf, Tensor) else leaf)
        seen.add(id(leaf))
    return tuple(result)


def _check_leaf(path: Path, leaf: object) -> None:
    if isinstance(leaf, (Tensor, *_CONSTANTS)):
        return
    raise InputError(
        f"argument {identifier(path)} is a {type(leaf).__name__}: pass tensors, numbers, strings, None or containers "
        "of them; a dataclass of your own can be registered with torch.export.register_dataclass"
    )
