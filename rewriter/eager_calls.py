"""The second route: a submodule that can't be traced (routing by a loop over experts, for one) stays eager.

While the model is exported such a submodule runs as one opaque operation. Its output shapes are told from eager runs of the model, on
the example and on larger ones. Folding puts the user's own module in its place, so nothing of this is left in a result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any, TypeAlias, TypeVar
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from resfx.capture_errors import CaptureError
from resfx.dynamic import Attempt
from resfx.failure import failing_module, is_data_dependent
from resfx.patterns.dialect import source_of
from resfx.verify import trial_run

T = TypeVar("T")
Axis: TypeAlias = tuple[int, int]  # (which tensor of the arguments, its axis)
Size: TypeAlias = int | tuple[Axis, ...]  # a number, or the product of sizes of the arguments


@torch.library.custom_op("resfx::eager_call", mutates_args=())
def eager_call(
    values: Sequence[Tensor], weights: Sequence[Tensor], path: str, output: int, size: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The `output`-th tensor that the module at `path` makes of `values`; a placeholder, never run."""
    raise CaptureError(f"the call of `{path}`, which can't be traced, was not folded into the module")


@eager_call.register_fake
def _eager_call(
    values: Sequence[Tensor], weights: Sequence[Tensor], path: str, output: int, size: Sequence[int], dtype: torch.dtype
) -> Tensor:
    return values[0].new_empty(size, dtype=dtype)


@dataclass(frozen=True)
class _Made:
    """A new tensor."""

    shape: tuple[Size, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Passed:
    """The very tensor that came in at this place."""

    number: int


@dataclass(frozen=True)
class _Law:
    """What one call returns; other leaves of its output are constants."""

    outputs: tuple[Any, ...]
    spec: pytree.TreeSpec


@dataclass(frozen=True)
class _Call:
    """One call as it was seen: shapes of the tensors among the arguments, and the leaves of the output."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[Any, ...]  # (shape, dtype), _Passed or a constant
    spec: pytree.TreeSpec


class _Unlawful(Exception):
    """The outputs do not follow from the arguments' sizes."""


def export_around(
    model: nn.Module, attempt: Attempt, export: Callable[[Attempt], T], leaves: Sequence[str] | None
) -> tuple[T, Attempt, Exception | None]:
    """Export by one attempt; kinds of submodules whose own code stops the export stay eager: in a second capture only its `leaves`.

    Returns the program, the attempt with what stays eager, and what the first of them failed with. Raises what the first one failed
    with where that does not help.
    """
    first: Exception | None = None
    while True:
        try:
            with _staying_eager(model, attempt), _unaware(attempt.lenient):
                return export(attempt), attempt, first
        except Exception as error:
            first = first or error
            more = [path for path in _untraceable(model, error, attempt) if leaves is None or _is_in(path, leaves)]
            if not more:
                if first is error:
                    raise
                raise first from error
            attempt = replace(attempt, eager=(*attempt.eager, *more))


def _is_in(path: str, leaves: Sequence[str]) -> bool:
    return any(path == leaf or path.startswith(leaf + ".") for leaf in leaves)


def second_route(tries: Sequence[Attempt]) -> list[Attempt]:
    """After all attempts: the model does not learn that it is being traced, and any failure of a submodule makes it stay eager."""
    return [replace(attempt, lenient=True) for attempt in (tries[0], tries[-1])] if len(tries) > 1 else []


def refuse_unfolded(graph: fx.Graph) -> None:
    """Raises CaptureError where an opaque operation is left."""
    for node in graph.nodes:
        if node.target is torch.ops.resfx.eager_call.default:
            raise CaptureError(
                f"module `{node.args[2]}`, called at {source_of(node)}, can't be traced, and can't be kept as one call either: it takes"
                " or returns values that no graph can hold, as a number or a flag made of a tensor (`.item()`). Give it tensors,"
                " constants and plain containers."
            )


def _untraceable(model: nn.Module, error: Exception, attempt: Attempt) -> tuple[str, ...]:
    """The submodules of the kind that stopped the export; none where it is the root, or nothing new."""
    if isinstance(error, _Unlawful) or not (attempt.lenient or is_data_dependent(error)):
        return ()
    path = failing_module(error, model)
    if not path or path in attempt.eager:
        return ()
    kind = type(model.get_submodule(path))
    return tuple(name for name, module in model.named_modules() if type(module) is kind and name not in attempt.eager)


@contextlib.contextmanager
def _unaware(lenient: bool) -> Iterator[None]:
    """Models that ask torch whether they are being compiled take their eager way."""
    with contextlib.ExitStack() as stack:
        for question in ("is_compiling", "is_dynamo_compiling", "is_exporting") if lenient else ():
            stack.enter_context(mock.patch.object(torch.compiler, question, return_value=False))
        yield


@contextlib.contextmanager
def _staying_eager(model: nn.Module, attempt: Attempt) -> Iterator[None]:
    """Each module of `attempt.eager` is one opaque operation. Raises _Unlawful."""
    laws = _laws(model, attempt) if attempt.eager else {}
    with contextlib.ExitStack() as stack:
        for path, calls in laws.items():
            module = model.get_submodule(path)
            stack.enter_context(mock.patch.dict(vars(module), forward=_opaque(module, path, calls)))
        yield


def _opaque(module: nn.Module, path: str, laws: Sequence[_Law]) -> Callable[..., Any]:
    count = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        law = laws[count % len(laws)]  # torch may trace more than once
        count += 1
        values = _tensors((args, kwargs))
        weights = list(module.parameters())
        outputs = [_output(leaf, path, i, values, weights) for i, leaf in enumerate(law.outputs)]
        return pytree.tree_unflatten(outputs, law.spec)

    return forward


def _output(leaf: Any, path: str, number: int, values: list[Tensor], weights: list[nn.Parameter]) -> Any:
    if isinstance(leaf, _Passed):
        return values[leaf.number]
    if not isinstance(leaf, _Made):
        return leaf
    sizes = [size if isinstance(size, int) else prod(values[i].shape[axis] for i, axis in size) for size in leaf.shape]
    return eager_call(values, weights, path, number, sizes, leaf.dtype)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


# -- what the calls return, told from eager runs


def _laws(model: nn.Module, attempt: Attempt) -> dict[str, list[_Law]]:
    """path -> one law a call, for the modules that are called at all. Raises _Unlawful."""
    runs = [_observed(model, attempt.eager, attempt.args, attempt.kwargs)]
    rank = max((t.dim() for t in _tensors((attempt.args, attempt.kwargs))), default=0)
    for axis in range(rank):
        if _is_open(attempt.dynamic_shapes, axis):
            runs.extend(_longer_run(model, attempt, axis))
    if any(
        {path: len(calls) for path, calls in run.items()} != {p: len(c) for p, c in runs[0].items()} for run in runs
    ):
        raise _Unlawful
    return {path: [_law(calls) for calls in zip(*(run[path] for run in runs), strict=True)] for path in runs[0]}


def _longer_run(model: nn.Module, attempt: Attempt, axis: int) -> list[dict[str, list[_Call]]]:
    """The model on one more along `axis`, or on twice as much. None where it takes neither: it fixes that size itself."""
    for more in (1, None):
        with contextlib.suppress(_Unlawful):
            args, kwargs = _longer((attempt.args, attempt.kwargs), axis, more)
            return [_observed(model, attempt.eager, args, kwargs)]
    return []


def _is_open(spec: Any, axis: int) -> bool:
    if isinstance(spec, Mapping):
        return axis in spec or any(_is_open(inner, axis) for inner in spec.values())
    return isinstance(spec, (list, tuple)) and any(_is_open(inner, axis) for inner in spec)


def _longer(tree: Any, axis: int, more: int | None) -> Any:
    """Every tensor with its first `more` rows along `axis` (None: all) once again. What was 1 stays 1."""

    def one(value: Tensor) -> Tensor:
        if value.dim() <= axis or value.shape[axis] == 1:
            return value
        return torch.cat([value, value.narrow(axis, 0, more or value.shape[axis])], axis)

    return pytree.tree_map_only(Tensor, one, tree)


def _observed(model: nn.Module, paths: Sequence[str], args: Any, kwargs: Any) -> dict[str, list[_Call]]:
    """Run the model in eval mode and note the calls of `paths`. Raises _Unlawful where it does not run, or an argument is written to."""
    found: dict[str, list[_Call]] = {}
    before: list[list[Tensor]] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        before.append([value.clone() for value in _tensors((args, kwargs))])

    def leave(path: str, args: Any, kwargs: Any, output: Any) -> None:
        inputs = _tensors((args, kwargs))
        kept = before.pop()
        if not inputs or any(
            not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(inputs, kept, strict=True)
        ):
            raise _Unlawful
        leaves, spec = pytree.tree_flatten(output)
        outputs = tuple(_seen(leaf, inputs) for leaf in leaves)
        found.setdefault(path, []).append(_Call(tuple(tuple(v.shape) for v in inputs), outputs, spec))

    with contextlib.ExitStack() as stack:
        for path in paths:
            module = model.get_submodule(path)
            note = lambda module, args, kwargs, output, path=path: leave(path, args, kwargs, output)  # noqa: E731
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
        try:
            trial_run(model, args, kwargs)
        except Exception as error:
            raise _Unlawful from error
    return found


def _seen(leaf: Any, inputs: Sequence[Tensor]) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    same = next((i for i, value in enumerate(inputs) if value is leaf), None)
    return (tuple(leaf.shape), leaf.dtype) if same is None else _Passed(same)


def _law(calls: tuple[_Call, ...]) -> _Law:
    """One call, seen in several runs."""
    if any(call.spec != calls[0].spec for call in calls):
        raise _Unlawful
    return _Law(tuple(_leaf(leaves, calls) for leaves in zip(*(c.outputs for c in calls), strict=True)), calls[0].spec)


def _leaf(leaves: tuple[Any, ...], calls: tuple[_Call, ...]) -> Any:
    if not (isinstance(leaves[0], tuple) and len(leaves[0]) == 2 and isinstance(leaves[0][1], torch.dtype)):
        if any(leaf != leaves[0] for leaf in leaves):
            raise _Unlawful
        return leaves[0]
    shapes, dtypes = zip(*leaves, strict=True)
    if len({len(shape) for shape in shapes}) > 1 or len(set(dtypes)) > 1:
        raise _Unlawful
    rank = len(shapes[0])
    sizes = enumerate(zip(*shapes, strict=True))
    return _Made(
        tuple(_of_an_argument(axis, rank, seen, calls) or _size(seen, calls) for axis, seen in sizes), dtypes[0]
    )


def _of_an_argument(axis: int, rank: int, sizes: tuple[int, ...], calls: tuple[_Call, ...]) -> Size | None:
    """The same axis of an argument with as many axes, where it has that size in all runs: there may be no run with another one."""
    for number, shape in enumerate(calls[0].inputs):
        if len(shape) == rank and all(c.inputs[number][axis] == size for c, size in zip(calls, sizes, strict=True)):
            return ((number, axis),)
    return None


def _size(sizes: tuple[int, ...], calls: tuple[_Call, ...]) -> Size:
    """A number, the size of an argument, or the product of two sizes of one argument: what fits all runs."""
    if len(set(sizes)) == 1:
        return sizes[0]
    for count in (1, 2):
        for number, shape in enumerate(calls[0].inputs):
            for axes in combinations(range(len(shape)), count):
                if all(
                    prod(c.inputs[number][axis] for axis in axes) == size for c, size in zip(calls, sizes, strict=True)
                ):
                    return tuple((number, axis) for axis in axes)
    raise _Unlawful
