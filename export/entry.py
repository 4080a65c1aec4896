"""What a compiled package takes, as data that travels in the package."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree  # what torch.export's own documents point to; there is no public name

from resfx.export.call import Call
from resfx.export.sizes import input_values, sizes_of
from resfx.export.symbolic import assumptions, size_function

_UNTOLD = "-1"  # a size or stride that can't be written as a function of the open sizes
_TOO_LARGE = 2.0**48  # a bound beyond this is none


@dataclass(frozen=True)
class Port:
    """One tensor of the call. Sizes and strides are printed expressions of the open sizes."""

    name: str
    dtype: str
    device: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]


@dataclass(frozen=True)
class Constant:
    """One value that is part of the compiled code, as its repr."""

    name: str
    value: str


@dataclass(frozen=True)
class Reading:
    """An open size is read where it stands in the call: `(size - shift) // factor` of tensor `port` along `axis`."""

    symbol: str
    port: int
    axis: int
    factor: int = 1
    shift: int = 0


@dataclass(frozen=True)
class Entry:
    """Everything about a call. `leaves` are in the order of the flattened (args, kwargs)."""

    tree: str
    leaves: tuple[Port | Constant, ...]
    readings: tuple[Reading, ...]
    assumed: tuple[str, ...]

    def to_text(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> Entry:
        """What `to_text` wrote."""
        data = json.loads(text)
        leaves = tuple(
            Constant(**leaf)
            if "value" in leaf
            else Port(**{**leaf, "sizes": tuple(leaf["sizes"]), "strides": tuple(leaf["strides"])})
            for leaf in data["leaves"]
        )
        readings = tuple(Reading(**reading) for reading in data["readings"])
        return Entry(data["tree"], leaves, readings, tuple(data["assumed"]))


def entry_of(call: Call, program: ExportedProgram) -> Entry:
    """What `program`, exported for `call`, takes.

    An assumption that the example itself does not meet is left out: an example batch of 1 is exported as 2.
    """
    values = input_values(program)
    readings = tuple(_readings(values))
    symbols = [reading.symbol for reading in readings]
    names = iter(zip(call.names, values, strict=True))
    leaves = tuple(
        _port(*next(names), symbols) if isinstance(leaf, Tensor) else Constant(label, repr(leaf))
        for label, leaf in zip(call.labels, call.leaves, strict=True)
    )
    example = [read(reading, call.tensors) for reading in readings]
    assumed = [*_bounds(sizes_of(program).ranges, symbols), *(str(expression) for expression in assumptions(values))]
    kept = [text for text in dict.fromkeys(assumed) if _holds(text, symbols, example)]
    return Entry(pytree.treespec_dumps(call.spec), leaves, readings, tuple(kept))


def _port(name: str, value: Tensor, symbols: Sequence[str]) -> Port:
    def told(size: Any) -> str:
        return str(size) if size_function(str(size), symbols) is not None else _UNTOLD

    sizes, strides = tuple(map(told, value.shape)), tuple(map(told, value.stride()))
    return Port(name, str(value.dtype), value.device.type, sizes, strides)


def _readings(values: Sequence[Tensor]) -> Iterator[Reading]:
    """One place for each open size: where it stands alone, else where it stands with a factor and a shift."""
    places = [(size, port, axis) for port, value in enumerate(values) for axis, size in enumerate(value.shape)]
    known: set[str] = set()
    for alone in (True, False):
        for size, port, axis in places:
            if isinstance(size, int):
                continue
            shift, rest = size.node.expr.as_coeff_Add()
            factor, symbol = rest.as_coeff_Mul()
            whole = shift.is_Integer and factor.is_Integer
            if whole and symbol.is_Symbol and str(symbol) not in known and (rest == size.node.expr == symbol) is alone:
                known.add(str(symbol))
                yield Reading(str(symbol), port, axis, int(factor), int(shift))


def read(reading: Reading, tensors: Sequence[Tensor]) -> int:
    """The open size, from the tensors of a call."""
    return (tensors[reading.port].shape[reading.axis] - reading.shift) // reading.factor


def _bounds(ranges: Mapping[str, tuple[float, float]], symbols: Sequence[str]) -> Iterator[str]:
    """Bounds that go beyond torch's own assumption of at least 2, which holds for 0 and 1 as well."""
    for symbol in symbols:
        least, most = ranges.get(symbol, (0, float("inf")))
        if least > 2:
            yield f"{symbol} >= {int(least)}"
        if most < _TOO_LARGE:
            yield f"{symbol} <= {int(most)}"


def _holds(text: str, symbols: Sequence[str], sizes: Sequence[int]) -> bool:
    test = size_function(text, symbols)
    return test is not None and bool(test(*sizes))
