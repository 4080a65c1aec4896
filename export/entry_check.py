"""The check of a call against what a compiled package takes.

Compiled code trusts its caller: a wrong size or dtype makes it crash or read memory that means something else, and a
number that was a constant of the export is ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree  # what torch.export's own documents point to; there is no public name

from resfx.export.entry import Constant, Entry, Port, read
from resfx.export.errors import InputError
from resfx.export.symbolic import names_in, readable, size_function


class EntryCheck:
    """Checks calls of a package against its entry."""

    def __init__(self, entry: Entry) -> None:
        self._tree = pytree.treespec_loads(entry.tree)
        self._leaves = entry.leaves
        self._ports = [leaf for leaf in entry.leaves if isinstance(leaf, Port)]
        self._dtypes = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
        self._readings = entry.readings
        self._symbols = [reading.symbol for reading in entry.readings]
        self._where = {r.symbol: f"{self._ports[r.port].name}.shape[{r.axis}]" for r in entry.readings if r.factor == 1}
        self._assumed = [(text, size_function(text, self._symbols)) for text in entry.assumed]
        layout = ", ".join(f"(({_tuple(port.sizes)}), ({_tuple(port.strides)}))" for port in self._ports)
        self._layout = size_function(f"[{layout}]", self._symbols)
        # The same sizes come again and again, and a deep model assumes much about them.
        self._expected = functools.lru_cache(maxsize=256)(self._layout_at)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in the order of the package's own call. Raises InputError naming the one that does not fit."""
        try:
            values = self._tree.flatten_up_to((args, kwargs))
        except ValueError as error:
            raise InputError(f"the call does not fit the package, which takes {self._taken()}: {error}") from error
        tensors = [v for v, leaf in zip(values, self._leaves, strict=True) if self._is_tensor(v, leaf)]
        expected = self._expected(*(read(reading, tensors) for reading in self._readings))
        for port, tensor, (sizes, strides) in zip(self._ports, tensors, expected, strict=True):
            if tensor.shape != sizes or tensor.stride() != strides:
                self._check_layout(port, tensor, sizes, strides)
        result: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_unflatten(values, self._tree)
        return result

    def _is_tensor(self, value: Any, leaf: Port | Constant) -> bool:
        """Is it one? Raises InputError where it is none and should be, or has another dtype, device or rank."""
        if isinstance(leaf, Constant):
            if repr(value) != leaf.value:
                raise InputError(
                    f"argument `{leaf.name}` is {_short(value)}, the package was compiled for {leaf.value} as a constant: "
                    "compile one for each value, or pass a tensor"
                )
            return False
        if not isinstance(value, Tensor):
            raise InputError(f"argument `{leaf.name}` is {_short(value)}, the package takes a tensor")
        if value.dtype is not self._dtypes[leaf.dtype]:
            raise InputError(
                f"argument `{leaf.name}` is {value.dtype}, the package takes {leaf.dtype}: cast it with .to({leaf.dtype})"
            )
        if value.device.type != leaf.device:
            raise InputError(f"argument `{leaf.name}` is on {value.device}, the package runs on {leaf.device}")
        if value.dim() != len(leaf.sizes):
            raise InputError(
                f"argument `{leaf.name}` has {value.dim()} dimensions, the package takes {self._shape(leaf)}"
            )
        return True

    def _layout_at(self, *sizes: int) -> Sequence[tuple[tuple[int, ...], tuple[int, ...]]]:
        """The sizes and strides of every tensor where the open sizes are `sizes`. Raises InputError."""
        for text, holds in self._assumed:
            if holds is not None and not holds(*sizes):
                found = ", ".join(
                    f"`{self._ports[r.port].name}` axis {r.axis} = {size * r.factor + r.shift}"
                    for r, size in zip(self._readings, sizes, strict=True)
                    if r.symbol in names_in(text)
                )
                raise InputError(
                    f"{found}: the package was compiled for {readable(text, self._where)}; compile one with such an example"
                )
        assert self._layout is not None  # `_port` writes only what can be evaluated
        layout: Sequence[tuple[tuple[int, ...], tuple[int, ...]]] = self._layout(*sizes)
        return layout

    def _check_layout(self, port: Port, tensor: Tensor, sizes: Sequence[int], strides: Sequence[int]) -> None:
        for axis, (got, want) in enumerate(zip(tensor.shape, sizes, strict=True)):
            if got != want >= 0:
                here = "" if port.sizes[axis] == str(want) else f", here {want}"
                raise InputError(
                    f"argument `{port.name}`, axis {axis}: size {got}, the package takes {self._shape(port)}{here}: "
                    "compile one with such an example"
                )
        if tensor.numel() == 0:
            return
        for size, got, want in zip(tensor.shape, tensor.stride(), strides, strict=True):
            if size > 1 and got != want >= 0:
                raise InputError(
                    f"argument `{port.name}` has the strides {tuple(tensor.stride())}, the package reads memory laid out as "
                    f"{tuple(strides)}: pass {port.name}.contiguous(), or compile with an example of this layout"
                )

    def _shape(self, port: Port) -> str:
        """The sizes as a reader takes them: `[*, 8]`, an open size being a star or an expression."""
        own = {r.symbol: "*" for r in self._readings if self._ports[r.port] is port and r.factor == 1}
        sizes = (readable(size, own if size in own else self._where) for size in port.sizes)
        return "[" + ", ".join(sizes) + "]"

    def _taken(self) -> str:
        args, kwargs = pytree.tree_unflatten([leaf.name for leaf in self._leaves], self._tree)
        return f"({', '.join([*map(_plain, args), *(f'{name}={_plain(value)}' for name, value in kwargs.items())])})"


def _tuple(items: Sequence[str]) -> str:
    return "".join(f"{item}, " for item in items)


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


def _plain(value: Any) -> str:
    return str(value).replace("'", "")
