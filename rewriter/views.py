"""Views as data: which slice of its source a view node shows, and how to put a new value back through it."""

from __future__ import annotations

import operator
from typing import Any, TypeAlias

import torch
from torch import fx

from resfx.patterns.places import is_whole_slice

aten = torch.ops.aten

# A view without its source: the op and its other arguments, hashable.
ViewKey: TypeAlias = tuple[Any, ...]

_SELF_INVERSE = {aten.transpose.int, aten.t.default, aten.swapaxes.default, aten.swapdims.default, aten.numpy_T.default}
_RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.view_as.default,
    aten.reshape_as.default,
}
_SPLITS = {
    aten.chunk.default,
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.tensor_split.sections,
}


def same_storage(left: Any, right: Any) -> bool:
    """Do two (fake) tensors share memory? torch has no public test for fake tensors, which all lie at address 0."""
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    is_alias: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
    return bool(is_alias(left, right))


def source_of(node: fx.Node) -> fx.Node | None:
    """The argument of which `node` is a view (or which it is), None where it owns its memory."""
    if node.op not in ("call_function", "call_method"):
        return None
    value = node.meta.get("val")
    if isinstance(value, (list, tuple)):
        value = next((item for item in value if isinstance(item, torch.Tensor)), None)
    for argument in node.all_input_nodes:
        other = argument.meta.get("val")
        if isinstance(other, (list, tuple)):
            # One part of a split is a view; one result of an op with several (topk) owns its memory.
            if node.target is operator.getitem and source_of(argument) is not None:
                return argument
            continue
        if same_storage(value, other):
            return argument
    return None


def is_whole(node: fx.Node, source: fx.Node) -> bool:
    """Does the view show all of its source, in place? (detach, contiguous of something contiguous, x[:])"""
    value, other = node.meta.get("val"), source.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    if node.target is aten.slice.Tensor:
        return is_whole_slice(node)
    if value.dtype != other.dtype or value.dim() != other.dim():
        return False
    if node.target in _SELF_INVERSE or node.target is aten.permute.default:
        return False
    same = all(_equal(a, b) for a, b in zip(value.shape, other.shape, strict=True))
    return same and all(_equal(a, b) for a, b in zip(value.stride(), other.stride(), strict=True))


def _equal(left: Any, right: Any) -> bool:
    """Equal for sure, without putting a new guard on symbolic sizes."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return str(left) == str(right)


def _slice_arguments(node: fx.Node) -> tuple[Any, Any, Any, Any]:
    given = list(node.args[1:])
    dim, start, end, step = given + [0, None, None, 1][len(given) :]
    return dim, start, end, step


def view_key(node: fx.Node, source: fx.Node) -> ViewKey:
    """What the view does, without naming its source: equal keys on one source are one view."""

    def freeze(value: Any) -> Any:
        if value is source:
            return "source"
        if isinstance(value, (list, tuple)):
            return tuple(freeze(item) for item in value)
        if isinstance(value, slice):
            return ("slice", freeze(value.start), freeze(value.stop), freeze(value.step))
        return value

    if node.target is aten.slice.Tensor:
        return (node.target, *_slice_arguments(node))
    return (node.target, freeze(node.args), tuple((k, freeze(v)) for k, v in node.kwargs.items()))


def put_back(graph: fx.Graph, view: fx.Node, parent: fx.Node, value: fx.Node) -> fx.Node | None:
    """`parent` with the part that `view` shows replaced by `value`; None where the view has no known inverse.

    Nodes are inserted at the graph's current insertion point.
    """
    target: Any = view.target
    if target is aten.slice.Tensor:
        return graph.call_function(aten.slice_scatter.default, (parent, value, *_slice_arguments(view)))
    if target is aten.narrow.default:
        dim, start, length = view.args[1:4]
        end = graph.call_function(operator.add, (start, length)) if _symbolic(start, length) else start + length  # type: ignore[operator]
        return graph.call_function(aten.slice_scatter.default, (parent, value, dim, start, end, 1))
    if target is aten.select.int:
        return graph.call_function(aten.select_scatter.default, (parent, value, *view.args[1:]))
    if target is aten.diagonal.default:
        return graph.call_function(aten.diagonal_scatter.default, (parent, value, *view.args[1:]), dict(view.kwargs))
    if target in _SELF_INVERSE:
        return graph.call_function(target, (value, *view.args[1:]))
    if target is aten.permute.default:
        return graph.call_function(target, (value, _inverse_permutation(view.args[1])))
    if target in _RESHAPES:
        return graph.call_function(aten.reshape_as.default, (value, parent))
    if target is operator.getitem:
        return _put_back_part(graph, view, parent, value)
    return None


def _symbolic(*values: Any) -> bool:
    return any(isinstance(value, fx.Node) for value in values)


def _inverse_permutation(dims: Any) -> list[int]:
    order = [dim % len(dims) for dim in dims]
    return [order.index(axis) for axis in range(len(order))]


def _put_back_part(graph: fx.Graph, view: fx.Node, parent: fx.Node, value: fx.Node) -> fx.Node | None:
    """The inverse of `chunk(x)[i]`, `split(x)[i]`, `unbind(x)[i]`."""
    split, index = view.args
    assert isinstance(split, fx.Node)
    assert isinstance(index, int)
    if split.target is aten.unbind.int:
        dim = split.args[1] if len(split.args) > 1 else split.kwargs.get("dim", 0)
        return graph.call_function(aten.select_scatter.default, (parent, value, dim, index))
    if split.target not in _SPLITS:
        return None
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    sizes = [part.shape[dim] for part in split.meta["val"]]
    if not all(isinstance(size, int) for size in sizes[: index + 1]):
        return None
    start = sum(sizes[:index])
    return graph.call_function(aten.slice_scatter.default, (parent, value, dim, start, start + sizes[index], 1))
