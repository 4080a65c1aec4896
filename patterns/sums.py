"""Sums as lists of terms: however an add is spelled or bracketed.

`terms_of(node)` reads one operation; `Sums` flattens trees of adds whose inner results nobody else reads.
Understood: add, sub, `alpha=`, python's `sum`, stack or cat + sum or mean, einsum with ones, addcmul, addcdiv, addmm, baddbmm, lerp.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, Literal

import torch
from torch.fx import Node

from resfx.patterns import dialect
from resfx.patterns.dialect import op_name
from resfx.patterns.streams import Term


def terms_of(node: Node) -> list[Term] | None:
    """The terms that `node` adds up, or None where it is no sum of at least two tensors."""
    reader = _READERS.get(op_name(node)) if node.op in ("call_function", "call_method") else None
    if reader is None:
        return None
    terms = reader(node)
    if terms is None or len(terms) < 2:
        return None
    return terms if _is_tensor(node) else None


def affine_operand(node: Node, static: Container[Node]) -> tuple[Node, float | Node] | None:
    """(x, s) of `node` = s x + b, where s and b are numbers, constant or made of Parameters alone and x has its shape."""
    terms = terms_of(node) or _number_shift(node)
    varying = [factored for term in terms or () if (factored := factored_term(term, static)) is not None]
    if len(varying) != 1:
        return None
    operand, factor = varying[0]
    if operand is None or not dialect.same_shape(operand, node):
        return None
    return operand, factor


def factored_term(term: Term, static: Container[Node]) -> tuple[Node | None, float | Node] | None:
    """(x, s) of a term s x; None where it is static, x None where more than one of its factors varies."""
    varying = [operand for operand in term.operands if operand not in static]
    if isinstance(term.scale, Node) and term.scale not in static:
        varying.append(term.scale)
    if not varying:
        return None
    operand = term.operands[0]
    if term.op == "value":
        return (operand if varying == [operand] else None), term.scale
    alone = term.op == "mul" and len(varying) == 1 and term.scale == 1
    factor = next((o for o in term.operands if o in static), None)
    return (varying[0], factor) if alone and factor is not None else (None, term.scale)


def _number_shift(node: Node) -> list[Term] | None:
    """The one term of `x + 0.5`, `x - 0.5` and `0.5 - x`."""
    name, (left, right) = op_name(node), (*node.args, None, None)[:2]
    if name not in ("add", "sub", "rsub") or not _is_tensor(node):
        return None
    if isinstance(left, Node) and _is_number(right):
        return [Term("value", (left,), -1 if name == "rsub" else 1)]
    if isinstance(right, Node) and _is_number(left):
        return [Term("value", (right,), -1 if name == "sub" else 1)]
    return None


def adds_nothing(node: Node) -> Node | None:
    """The operand of `x + 0` (python's `sum` starts so), `x * 1` or `x / 1`."""
    name = op_name(node)
    if name not in ("add", "sub", "mul", "div") or len(node.args) < 2:
        return None
    neutral = 0 if name in ("add", "sub") else 1
    left, right = node.args[0], node.args[1]
    if isinstance(left, Node) and _is_number(right) and right == neutral:
        return left
    if name in ("add", "mul") and isinstance(right, Node) and _is_number(left) and left == neutral:
        return right
    return None


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _is_tensor(node: Node) -> bool:
    val = dialect.value(node)
    return val is None or (isinstance(val, torch.Tensor) and dialect.is_floating(node))


def _argument(node: Node, index: int, name: str, default: Any = None) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[index] if len(node.args) > index else default


def _scaled(scale: float | Node, factor: float) -> float | Node | None:
    """`scale * factor` where that needs no new node."""
    if isinstance(scale, Node):
        return scale if factor == 1 else None
    return scale * factor


def _add(node: Node) -> list[Term] | None:
    left, right = _argument(node, 0, "input"), _argument(node, 1, "other")
    if not isinstance(left, Node) or not isinstance(right, Node):
        return None
    alpha = _argument(node, 2, "alpha", 1)
    name = op_name(node)
    if name == "rsub":
        left, right = right, left  # other - alpha * input
    scale = _scaled(alpha, 1 if name == "add" else -1)
    if scale is None:
        return None
    return [Term("value", (left,)), Term("value", (right,), scale)]


def _reduced_stack(node: Node) -> list[Term] | None:
    """`stack([a, b], k).sum(k)` and `.mean(k)`; python's builtin sum arrives as adds."""
    return None if _argument(node, 2, "keepdim", False) else _summed_stack(node)


def _squeezed(node: Node) -> list[Term] | None:
    """`stack([a, b], k).sum(k, keepdim=True).squeeze(k)`."""
    kept = _argument(node, 0, "input")
    if not isinstance(kept, Node) or op_name(kept) not in ("sum", "mean") or not _argument(kept, 2, "keepdim", False):
        return None
    summed, squeezed = _dims(kept), _dims(node)
    same = len(summed) == len(squeezed) == 1 and _same_axis(kept, summed[0], squeezed[0])
    return _summed_stack(kept) if same else None


def stacked_without_nans(node: Node) -> list[Node]:
    """What `nansum` adds up of a stack, each apart from its NaNs; nothing for any other node."""
    stacked, dims = _argument(node, 0, "input"), _dims(node) if op_name(node) == "nansum" else []
    return (_stacked(stacked, dims[0]) or []) if isinstance(stacked, Node) and len(dims) == 1 else []


def _dims(node: Node) -> list[int]:
    dims = _argument(node, 1, "dim")
    return [dims] if isinstance(dims, int) else list(dims or ())


def _summed_stack(node: Node) -> list[Term] | None:
    stacked, dims = _argument(node, 0, "input"), _dims(node)
    if not isinstance(stacked, Node):
        return None
    tensors = _stacked(stacked, dims[0]) if len(dims) == 1 else None
    if tensors is None:
        return None
    scale = 1.0 if op_name(node) == "sum" else 1.0 / len(tensors)
    return [Term("value", (tensor,), scale) for tensor in tensors]


def _stacked(node: Node, dim: int) -> list[Node] | None:
    """The tensors that lie along axis `dim`: of a `stack`, of a `cat` of unsqueezed ones, or of a `cat` that is split up."""
    if op_name(node) in _RESHAPE:
        return _split_cat(node, dim)
    listed = list(_argument(node, 0, "tensors") or ()) if op_name(node) in ("stack", "cat") else []
    if not listed or not _same_axis(node, dim, _argument(node, 1, "dim", 0)):
        return None
    if op_name(node) == "stack":
        return listed
    if not all(isinstance(p, Node) and op_name(p) == "unsqueeze" for p in listed):
        return None
    if not all(_same_axis(piece, dim, _argument(piece, 1, "dim")) for piece in listed):
        return None
    return [piece.args[0] for piece in listed]


def _split_cat(node: Node, dim: int) -> list[Node] | None:
    """The pieces of `cat([a, b], k)` where `node` views axis k as (pieces, size of one): it's `stack([a, b], k)` then."""
    cat = node.args[0]
    if not isinstance(cat, Node) or op_name(cat) != "cat":
        return None
    pieces = list(_argument(cat, 0, "tensors"))
    shape = dialect.shape_of(node)
    if shape is None or not all(isinstance(piece, Node) and dialect.same_shape(piece, pieces[0]) for piece in pieces):
        return None
    axis, one = dim % len(shape), list(dialect.shape_of(pieces[0]) or ())
    if not _same_axis(cat, axis, _argument(cat, 1, "dim", 0)):
        return None
    return pieces if dialect.equal_shapes(shape, [*one[:axis], len(pieces), *one[axis:]]) else None


def _same_axis(stacked: Node, a: int, b: int) -> bool:
    shape = dialect.shape_of(stacked)
    return a == b if shape is None else a % len(shape) == b % len(shape)


def _einsum(node: Node) -> list[Term] | None:
    """`einsum("n,n...->...", ones, stack([a, b]))`: a sum over the stacked axis with weights one."""
    equation, operands = node.args[0], node.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "->" not in equation:
        return None
    left, out = equation.replace(" ", "").split("->")
    subscripts = left.split(",")
    if len(operands) == 1:
        return _einsum_sum(operands[0], left, out)
    if len(operands) != 2:
        return None
    for i, j in ((0, 1), (1, 0)):
        weights, stacked, axes = operands[i], operands[j], subscripts[j]
        if not (isinstance(weights, Node) and isinstance(stacked, Node) and op_name(stacked) == "stack"):
            continue
        if len(subscripts[i]) != 1 or out != axes.replace(subscripts[i], "", 1) or not _is_ones(weights):
            continue
        if axes.index(subscripts[i]) == _argument(stacked, 1, "dim", 0):
            return [Term("value", (tensor,)) for tensor in _argument(stacked, 0, "tensors")]
    return None


def _einsum_sum(stacked: Any, axes: str, out: str) -> list[Term] | None:
    """`einsum("nbd->bd", stack([a, b]))`: the stacked axis is summed, the others stay as they are."""
    if not isinstance(stacked, Node) or op_name(stacked) != "stack" or "." in axes:
        return None
    axis = _argument(stacked, 1, "dim", 0) % len(axes)
    if axes[:axis] + axes[axis + 1 :] != out:
        return None
    return [Term("value", (tensor,)) for tensor in _argument(stacked, 0, "tensors")]


def _is_ones(node: Node) -> bool:
    name = op_name(node)
    if name in ("ones", "new_ones", "ones_like"):
        return True
    return name in ("full", "new_full", "full_like") and bool(node.args[-1] == 1)


def _addcmul(node: Node) -> list[Term] | None:
    state, a, b = node.args[:3]
    scale = _argument(node, 3, "value", 1)
    if not all(isinstance(x, Node) for x in (state, a, b)):
        return None
    product: Literal["mul", "div"] = "mul" if op_name(node) == "addcmul" else "div"
    return [Term("value", (state,)), Term(product, (a, b), scale)]  # type: ignore[arg-type]


def _addmm(node: Node) -> list[Term] | None:
    state, a, b = node.args[:3]
    beta, alpha = _argument(node, 3, "beta", 1), _argument(node, 4, "alpha", 1)
    if not all(isinstance(x, Node) for x in (state, a, b)):
        return None
    product = "mm" if op_name(node) == "addmm" else "bmm"
    return [Term("value", (state,), beta), Term(product, (a, b), alpha)]  # type: ignore[arg-type]


def _lerp(node: Node) -> list[Term] | None:
    """`lerp(x, f, w)` with a number `w`: (1 - w) x + w f. With a tensor it is a gated mix, and no sum."""
    start, end, weight = (_argument(node, i, name) for i, name in enumerate(("input", "end", "weight")))
    if not isinstance(start, Node) or not isinstance(end, Node) or not isinstance(weight, (int, float)):
        return None
    return [Term("value", (start,), 1 - weight), Term("value", (end,), weight)]


_RESHAPE = frozenset({"view", "reshape", "unflatten"})
_READERS = {
    "add": _add, "sub": _add, "rsub": _add, "sum": _reduced_stack, "mean": _reduced_stack, "squeeze": _squeezed, "einsum": _einsum,
    "addcmul": _addcmul, "addcdiv": _addcmul, "lerp": _lerp, "addmm": _addmm, "baddbmm": _addmm,
}  # fmt: skip


def flatten(terms: list[Term], inner: dict[Node, list[Term]]) -> list[Term]:
    """The terms with every operand in `inner` (a sum that only this one reads) replaced by its own terms."""
    flat: list[Term] = []
    for term in terms:
        nested = inner.get(term.operands[0]) if term.op == "value" else None
        rescaled = None if nested is None else _rescale(nested, term.scale)
        flat.extend([term] if rescaled is None else rescaled)
    return flat


def cancels(operand: Node, terms: list[Term]) -> bool:
    """Is the operand, behind no casts or views, added as often as it is subtracted?"""
    scales = [t.scale for t in terms if t.op == "value" and t.operands[0] is operand]
    numbers = [scale for scale in scales if not isinstance(scale, Node)]
    return len(numbers) == len(scales) > 1 and sum(numbers) == 0


def _rescale(terms: list[Term], factor: float | Node) -> list[Term] | None:
    if factor == 1:
        return terms
    if isinstance(factor, Node):
        return None
    scales = [_scaled(term.scale, factor) for term in terms]
    if any(scale is None for scale in scales):
        return None
    return [Term(t.op, t.operands, s) for t, s in zip(terms, scales, strict=True) if s is not None]
