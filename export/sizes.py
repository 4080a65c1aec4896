"""Which sizes stay open in an export, and example inputs at another batch size.

Sizes of an exported program are printed expressions: "4" where fixed, "s0" or "2*s0" where open.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree  # what torch.export's own documents point to; there is no public name

from resfx.export.call import Call, Path, identifier
from resfx.export.errors import DynamicDimError

_SYMBOL = re.compile(r"\b[su]\d+\b")
Shape = tuple[str, ...]
Spec = Any  # torch.export's own: None, a dict dim -> Dim, or a sequence of them


@dataclass(frozen=True)
class Sizes:
    """The shapes of the inputs of an exported program and the range of each open size."""

    shapes: tuple[Shape, ...]
    ranges: Mapping[str, tuple[float, float]]

    def is_open(self, position: int, dim: int) -> bool:
        return bool(_SYMBOL.search(self.shapes[position][dim]))

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether every fixed size is the one of `tensors`."""
        pairs = zip(self.shapes, tensors, strict=True)
        return all(
            _SYMBOL.search(text) or text == str(size)
            for shape, tensor in pairs
            for text, size in zip(shape, tensor.shape, strict=True)
        )


def input_values(program: ExportedProgram) -> list[Tensor]:
    """The (fake) values of the program's tensor inputs, in order."""
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    return [value for value in (values.get(name) for name in names) if isinstance(value, Tensor)]


def sizes_of(program: ExportedProgram) -> Sizes:
    """The sizes of the program's tensor inputs, in order."""
    tensors = input_values(program)
    ranges = {str(symbol): (_bound(r.lower), _bound(r.upper)) for symbol, r in program.range_constraints.items()}
    return Sizes(tuple(tuple(str(size) for size in tensor.shape) for tensor in tensors), ranges)


def open_all(value: Any) -> Spec:
    """A torch.export spec of the same structure that leaves every size open that the model leaves open."""
    return pytree.tree_map(_open_leaf, value)


def flat_spec(model: nn.Module, call: Call, dynamic_shapes: Any) -> tuple[Spec, ...]:
    """One spec a tensor of `call`, from a torch.export spec of the model's own arguments (None: all open).

    Raises DynamicDimError for a name or a place that is no argument.
    """
    if dynamic_shapes is None:
        return tuple(_open_leaf(tensor) for tensor in call.tensors)
    if isinstance(dynamic_shapes, torch.export.ShapesCollection):
        args, kwargs = call.rebuild(call.tensors)
        dynamic_shapes = dynamic_shapes.dynamic_shapes(model, args, kwargs)  # type: ignore[no-untyped-call]
    named = _by_name(call, dynamic_shapes)
    return tuple(_follow(named, path) for path in call.paths)


def asks(spec: Spec) -> bool:
    """Whether a spec names a size that must stay open (`Dim("b")`, `Dim.DYNAMIC`)."""
    leaves = pytree.tree_leaves(spec, is_leaf=lambda node: isinstance(node, Dim))
    return any(isinstance(leaf, Dim) or leaf is Dim.DYNAMIC for leaf in leaves)


def symbols_named(sizes: Sizes, names: Sequence[str], spec: Sequence[Spec]) -> dict[str, str]:
    """A readable name for each symbol: the user's `Dim("seq")`, "batch", else `<input>_dim<i>` of its first place."""
    result: dict[str, str] = {}
    for place, name in _user_names(sizes, spec):
        result.setdefault(place, name)
    batch = batch_symbols(sizes, None)
    for shape, name in zip(sizes.shapes, names, strict=True):
        for dim, text in enumerate(shape):
            if _is_symbol(text):
                result.setdefault(text, "batch" if batch and text == batch[0] else f"{name}_dim{dim}")
    return result


def batch_symbols(sizes: Sizes, tensors: Sequence[Tensor] | None) -> list[str]:
    """The symbols that count the rows of the inputs, most certain first; empty where every dim 0 is fixed.

    The batch is a symbol in dim 0 that stands in no other dim of an input, if there is one, and in the most inputs.
    With `tensors`, further symbols of a dim 0 of the same size follow: inputs that the model never combines.
    """
    firsts = [shape[0] for shape in sizes.shapes if shape and _is_symbol(shape[0])]
    if not firsts:
        return []
    others = {symbol for shape in sizes.shapes for text in shape[1:] for symbol in _SYMBOL.findall(text)}
    counts = Counter(firsts)
    batch = max(dict.fromkeys(firsts), key=lambda symbol: (symbol not in others, counts[symbol]))
    if tensors is None:
        return [batch]
    pairs = list(zip(sizes.shapes, tensors, strict=True))
    size = next(tensor.shape[0] for shape, tensor in pairs if shape and shape[0] == batch)
    same = [shape[0] for shape, tensor in pairs if shape and shape[0] in counts and tensor.shape[0] == size]
    return list(dict.fromkeys([batch, *same]))


def other_batches(sizes: Sizes, tensors: Sequence[Tensor]) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
    """(batch size, inputs) at batch sizes other than the example's: one more, twice as many, one less.

    The rows of the example are repeated or cut along every dim that depends on the batch's symbol, wherever it stands.
    """
    symbols = batch_symbols(sizes, tensors)
    if not symbols:
        return
    known = {
        text: tensor.shape[dim]
        for shape, tensor in zip(sizes.shapes, tensors, strict=True)
        for dim, text in enumerate(shape)
        if _is_symbol(text)
    }
    now = known[symbols[0]]
    low = max(sizes.ranges.get(symbol, (0, 0))[0] for symbol in symbols)
    high = min(sizes.ranges.get(symbol, (0, sympy.oo))[1] for symbol in symbols)
    for size in dict.fromkeys((now + 1, 2 * now, now - 1)):
        if size > 0 and low <= size <= high:
            values = {**known, **dict.fromkeys(symbols, size)}
            yield size, tuple(_resized(t, shape, values) for t, shape in zip(tensors, sizes.shapes, strict=True))


def batch_of(sizes: Sizes, tensors: Sequence[Tensor]) -> int | None:
    """The example's batch size: of the open batch, else the first dim 0 there is; None where no input has a dim."""
    symbols = batch_symbols(sizes, tensors)
    pairs = zip(sizes.shapes, tensors, strict=True)
    rows = [(shape[0], tensor.shape[0]) for shape, tensor in pairs if shape]
    if symbols:
        return next(size for text, size in rows if text == symbols[0])
    return rows[0][1] if rows else None


def widened(call: Call) -> Call | None:
    """The call with two rows where the example has one, or None where the example's batch is not 1.

    torch.export fixes every size of 1, so a batch of 1 is captured as 2.
    """
    rows = [tensor.shape[0] for tensor in call.tensors if tensor.dim() > 0]
    if 1 not in rows or any(tensor.dim() > 1 and tensor.shape[0] > 1 for tensor in call.tensors):
        return None
    twice = [torch.cat([t, t]) if t.dim() > 0 and t.shape[0] == 1 else t for t in call.tensors]
    return call.with_tensors(twice)


def _bound(value: Any) -> float:
    return float(value) if value.is_finite else (float("inf") if value > 0 else float("-inf"))


def _open_leaf(leaf: object) -> Spec:
    return dict.fromkeys(range(leaf.dim()), Dim.AUTO) if isinstance(leaf, Tensor) else None


def _is_symbol(text: str) -> bool:
    return _SYMBOL.fullmatch(text) is not None


def _resized(tensor: Tensor, shape: Shape, values: Mapping[str, int]) -> Tensor:
    for dim, text in enumerate(shape):
        size = int(sympy.sympify(text).subs(values)) if _SYMBOL.search(text) else tensor.shape[dim]
        if size != tensor.shape[dim]:
            rows = torch.arange(size, device=tensor.device) % tensor.shape[dim]
            tensor = tensor.index_select(dim, rows)
    return tensor


def _by_name(call: Call, dynamic_shapes: Any) -> dict[str, Any]:
    if isinstance(dynamic_shapes, (tuple, list)):
        if len(dynamic_shapes) != len(call.bound):
            raise DynamicDimError(
                f"dynamic_shapes has {len(dynamic_shapes)} entries for {len(call.bound)} arguments "
                f"({', '.join(call.bound)}): give one entry an argument, None for a fixed one"
            )
        return dict(zip(call.bound, dynamic_shapes, strict=True))
    keywords = {key for value in call.bound.values() if isinstance(value, dict) for key in value}
    unknown = set(dynamic_shapes) - set(call.bound) - keywords
    if unknown:
        raise DynamicDimError(
            f"dynamic_shapes names {', '.join(sorted(unknown))}: the arguments are {', '.join(call.bound)}"
        )
    return dict(dynamic_shapes)


def _follow(named: dict[str, Any], path: Path) -> Spec:
    """The spec at `path`; None (all fixed) where the user said nothing about it."""
    spec: Any = named
    if path[0] not in named:  # a keyword of **kwargs stands under the name of the catch-all
        spec = next((value for value in named.values() if isinstance(value, dict) and path[0] in value), {})
    for key in path:
        if spec is None:
            return None
        try:
            spec = spec.get(key) if isinstance(spec, Mapping) else spec[key]
        except (TypeError, LookupError) as error:
            raise DynamicDimError(
                f"dynamic_shapes has no entry for {identifier(path)}: follow the arguments"
            ) from error
    return spec


def _user_names(sizes: Sizes, spec: Sequence[Spec]) -> Iterator[tuple[str, str]]:
    for shape, entry in zip(sizes.shapes, spec, strict=True):
        dims = entry.items() if isinstance(entry, Mapping) else enumerate(entry or ())
        for dim, wish in dims:
            name = getattr(wish, "__name__", None)
            if name is not None and _is_symbol(shape[dim]):
                yield shape[dim], name
