"""Which input dimensions are tried as dynamic, in which order, on which examples.

The default leaves every dimension of every tensor to `Dim.AUTO`, on an example whose size-1 dimensions are repeated to
2 (torch.export fixes a size of 1). Where a model refuses, the next, more modest attempt is made.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

# How many leading dimensions are left open, from bold to modest; None is all of them.
_LEVELS: tuple[int | None, ...] = (None, 2, 1, 0)
_LEVEL_TEXTS = {
    None: "every dimension open (of a single image: the first two)",
    2: "the first two dimensions open",
    1: "the first dimension open",
    0: "fixed sizes",
}


@dataclass(frozen=True)
class Attempt:
    """One try: the example call and the `dynamic_shapes` for torch.export."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: dict[str, Any] | None
    text: str
    grown: bool = False  # not the user's own sizes
    eager: tuple[str, ...] = ()  # paths of submodules that can't be traced, see eager_calls.py
    lenient: bool = False  # the second route


def canonical_call(
    parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with the arguments in the order of the signature, positional where possible."""
    bound = parameters.bind(*args, **kwargs)
    return bound.args, bound.kwargs


def _grow(value: Any, axes: int | None) -> Any:
    """Repeat every dimension of size 1 (only the first `axes` ones) to 2."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        counts = [2 if size == 1 and (axes is None or axis < axes) else 1 for axis, size in enumerate(leaf.shape)]
        return leaf.repeat(counts) if any(count > 1 for count in counts) else leaf

    return pytree.tree_map(one, value)


def _has_one(value: Any, axes: int | None) -> bool:
    return any(
        1 in leaf.shape[:axes] for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor) and leaf.dim()
    )


def _open(value: Any, axes: int | None) -> Any:
    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        return {axis: Dim.AUTO for axis, size in enumerate(leaf.shape[:axes]) if size != 1}  # torch fixes a size of 1

    return pytree.tree_map(one, value)


def _default_shapes(
    parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], axes: int | None
) -> dict[str, Any]:
    """The spec tree torch.export wants: one entry per given argument, by name."""
    bound = parameters.bind(*args, **kwargs)
    if axes is None and _is_one_image((args, kwargs)):
        axes = 2
    return {name: _open(value, axes) for name, value in bound.arguments.items()}


def _is_one_image(call: Any) -> bool:
    """The only tensor is of rank 4 or more: its batch is left open, its height and width only where they are asked for.

    Windows, padding and pooling of a symbolic image size cost torch's shape solver minutes (swin: 6 s with the batch
    open, over 300 s with all dimensions).
    """
    ranks = [leaf.dim() for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    return len(ranks) == 1 and ranks[0] >= 4


def _merged(default: dict[str, Any], asked: Mapping[str, Any], parameters: inspect.Signature) -> dict[str, Any]:
    """What the user asked for, the default for arguments they don't mention."""
    extra = next((n for n, p in parameters.parameters.items() if p.kind is inspect.Parameter.VAR_KEYWORD), None)
    merged = dict(default)
    for name, spec in asked.items():
        if name in merged:
            merged[name] = spec
        elif extra is not None and name in merged.get(extra, {}):
            merged[extra] = {**merged[extra], name: spec}
        else:
            merged[name] = spec  # torch.export names the unknown argument
    return merged


def attempts(
    parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Any
) -> Iterator[Attempt]:
    """The tries in order. `asked` is the user's `dynamic_shapes` (dict by name, or a sequence), or None."""
    if asked is not None and not isinstance(asked, Mapping):
        asked = dict(zip(parameters.bind(*args, **kwargs).arguments, asked, strict=False))
    yield from _grown_attempts(parameters, args, kwargs, asked or {})
    levels = _LEVELS if asked is None else (None, 0)
    for axes in levels:
        shapes = _merged(_default_shapes(parameters, args, kwargs, axes), asked or {}, parameters)
        yield Attempt(args, kwargs, shapes, _LEVEL_TEXTS[axes])


def _grown_attempts(
    parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any], asked: Mapping[str, Any]
) -> Iterator[Attempt]:
    for axes in (None, 1):
        if not _has_one((args, kwargs), axes):
            continue
        more_args, more_kwargs = _grow(args, axes), _grow(kwargs, axes)
        shapes = _merged(_default_shapes(parameters, more_args, more_kwargs, None), asked, parameters)
        yield Attempt(more_args, more_kwargs, shapes, "size 1 captured at 2, every dimension open", grown=True)


def asked_dims(
    dynamic_shapes: Any, parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[str, int, Any]]:
    """(argument, axis, wish) for every dimension the user asked to be dynamic; AUTO is a wish, not a demand."""
    if dynamic_shapes is None:
        return []
    if not isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = dict(zip(parameters.bind(*args, **kwargs).arguments, dynamic_shapes, strict=False))
    found: list[tuple[str, int, Any]] = []
    for name, spec in dynamic_shapes.items():
        _collect(name, spec, found)
    return found


def _is_dim(value: Any) -> bool:
    if value is None or isinstance(value, (int, str)) or value in (Dim.AUTO, Dim.STATIC):
        return False
    return not isinstance(value, (Mapping, list, tuple))


def _collect(label: str, spec: Any, found: list[tuple[str, int, Any]]) -> None:
    if isinstance(spec, Mapping):
        for key, value in spec.items():
            if isinstance(key, int) and _is_dim(value):
                found.append((label, key, value))
            elif isinstance(value, (Mapping, list, tuple)):
                _collect(f"{label}[{key!r}]", value, found)
        return
    if isinstance(spec, (list, tuple)):
        if all(not isinstance(value, (Mapping, list, tuple)) for value in spec):
            found.extend((label, axis, value) for axis, value in enumerate(spec) if _is_dim(value))
            return
        for i, value in enumerate(spec):
            _collect(f"{label}[{i}]", value, found)
