"""The one check at entry: do the inputs of a call lie inside what was captured?

Sizes that the model left open are symbols; everything the capture assumed about them (equal, divisible, in a range)
becomes a plain Python test on shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from resfx.capture_errors import GuardError
from resfx.export.symbolic import readable, size_function


@dataclass(frozen=True)
class TensorGuard:
    """Rank, dtype, fixed sizes and bounds of one input. Bounds: (axis, least, most), most None where there is none."""

    label: str
    dtype: torch.dtype
    rank: int
    fixed: tuple[tuple[int, int], ...]
    bounds: tuple[tuple[int, int, int | None], ...]


@dataclass(frozen=True)
class DimRule:
    """The size of input `index` along `axis` equals `size(*symbols)`."""

    index: int
    axis: int
    size: Callable[..., Any]
    text: str


@dataclass(frozen=True)
class Condition:
    """A test on the open sizes that held at capture."""

    test: Callable[..., Any]
    text: str


@dataclass(frozen=True)
class Guards:
    """Everything a capture assumed about its tensor inputs."""

    tensors: tuple[TensorGuard, ...] = ()
    symbols: tuple[tuple[int, int], ...] = ()  # where each open size is read: (input, axis)
    rules: tuple[DimRule, ...] = ()
    conditions: tuple[Condition, ...] = ()
    also: tuple[Guards, ...] = ()  # of another capture of the same model
    dtypes: frozenset[torch.dtype] = frozenset()  # of the model's parameters

    def merged(self, other: Guards) -> Guards:
        """Both; `self` where they say the same."""
        return self if self._text() == other._text() else replace(self, also=(*self.also, other))

    def _text(self) -> tuple[Any, ...]:
        rules = tuple((rule.index, rule.axis, rule.text) for rule in self.rules)
        return (self.tensors, self.symbols, rules, tuple(condition.text for condition in self.conditions))

    def check(self, inputs: Sequence[Any], model: nn.Module | None = None) -> None:
        """Raises GuardError naming argument and axis. `model` is the one that runs: `.to(dtype)` may have moved it."""
        for guard, tensor in zip(self.tensors, inputs, strict=True):
            _check_tensor(guard, tensor)
            if tensor.dtype != guard.dtype and not self._moved(guard.dtype, tensor.dtype, model):
                raise GuardError(
                    f"argument `{guard.label}` is {tensor.dtype}, at capture it was {guard.dtype}: cast it,"
                    " or rewrite again with such an example."
                )
        sizes = [inputs[index].shape[axis] for index, axis in self.symbols]
        for rule in self.rules:
            wanted = rule.size(*sizes)
            got = inputs[rule.index].shape[rule.axis]
            if got != wanted:
                _fail(self.tensors[rule.index].label, rule.axis, f"{got}, but {rule.text} is {wanted}")
        for condition in self.conditions:
            if not condition.test(*sizes):
                where = ", ".join(
                    f"`{self.tensors[i].label}` axis {axis} = {size}"
                    for (i, axis), size in zip(self.symbols, sizes, strict=True)
                )
                raise GuardError(f"{where}: the capture assumed {condition.text}. Rewrite again with such an example.")
        for guards in self.also:
            guards.check(inputs, model)

    def _moved(self, old: torch.dtype, new: torch.dtype, model: nn.Module | None) -> bool:
        """Is `new` a floating dtype that the model's parameters have now in place of one they had at capture?"""
        if model is None or not old.is_floating_point:
            return False
        now = parameter_dtypes(model)
        return new in now and now != self.dtypes and old not in getattr(model, "_fixed_dtypes", ())


def parameter_dtypes(model: nn.Module) -> frozenset[torch.dtype]:
    """The floating dtypes of the parameters."""
    return frozenset([p.dtype for p in model.parameters() if p.dtype.is_floating_point])


def _check_tensor(guard: TensorGuard, tensor: torch.Tensor) -> None:
    if tensor.dim() != guard.rank:
        raise GuardError(
            f"argument `{guard.label}` has {tensor.dim()} dimensions, at capture it had {guard.rank}: reshape it,"
            " or rewrite again with such an example."
        )
    for axis, size in guard.fixed:
        if tensor.shape[axis] != size:
            _fail(guard.label, axis, f"{tensor.shape[axis]}, but the model fixed it at {size}")
    for axis, least, most in guard.bounds:
        if tensor.shape[axis] < least:
            _fail(guard.label, axis, f"{tensor.shape[axis]}, but the capture holds from {least} on")
        if most is not None and tensor.shape[axis] > most:
            _fail(guard.label, axis, f"{tensor.shape[axis]}, but the capture holds up to {most}")


def _fail(label: str, axis: int, text: str) -> None:
    raise GuardError(f"argument `{label}`, axis {axis}: size {text}. Rewrite again with this size as the example.")


def _bounds(symbol: Any, ranges: dict[Any, Any]) -> tuple[int, int | None] | None:
    """(least, most) that go beyond torch's own assumption of at least 2, which holds for 0 and 1 as well."""
    found = ranges.get(symbol)
    if found is None:
        return None
    least = int(found.lower) if found.lower.is_integer else 0
    most = int(found.upper) if found.upper.is_integer and found.upper < 2**48 else None
    if least <= 2 and most is None:
        return None
    return (least if least > 2 else 0, most)


def fixed_size(size: Any) -> int | None:
    """The size as a number where the model left no choice, None where it is open."""
    if isinstance(size, int):
        return size
    return int(size.node.expr) if size.node.expr.is_number else None


def build_guards(
    labels: Sequence[str], values: Sequence[torch.Tensor], ranges: dict[Any, Any], assumed: Iterable[Any]
) -> Guards:
    """Guards for inputs with (fake) `values`.

    `ranges` maps symbols to their range, `assumed` are boolean expressions that held at capture.
    """
    names: dict[Any, str] = {}
    symbols: list[tuple[int, int]] = []
    where: dict[str, str] = {}
    tensors = []
    pending: list[tuple[int, int, Any]] = []
    for index, (label, value) in enumerate(zip(labels, values, strict=True)):
        fixed, bounds = [], []
        for axis, size in enumerate(value.shape):
            number = fixed_size(size)
            if number is not None:
                fixed.append((axis, number))
                continue
            expression = size.node.expr  # type: ignore[attr-defined]
            if not expression.is_Symbol or expression in names:
                pending.append((index, axis, expression))
                continue
            names[expression] = str(expression)
            symbols.append((index, axis))
            where[str(expression)] = f"{label}.shape[{axis}]"
            limits = _bounds(expression, ranges)
            if limits is not None:
                bounds.append((axis, *limits))
        tensors.append(TensorGuard(label, value.dtype, value.dim(), tuple(fixed), tuple(bounds)))
    arguments = list(names.values())
    rules = []
    for index, axis, expression in pending:
        function = size_function(str(expression), arguments)
        if function is not None:
            rules.append(DimRule(index, axis, function, readable(str(expression), where)))
    conditions = []
    for expression in assumed:
        if not expression.free_symbols or not expression.free_symbols <= set(names):
            continue
        function = size_function(str(expression), arguments)
        if function is not None:
            conditions.append(Condition(function, readable(str(expression), where)))
    return Guards(tuple(tensors), tuple(symbols), tuple(rules), tuple(conditions))
