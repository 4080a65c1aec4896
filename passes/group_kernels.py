"""What `group_read` computes on a GPU, as operators that a compiler sees: the kernels of `group_triton`, launched over all tokens.

Sources and their gradients are [tokens, D] and contiguous, keys [readers, D], scalars [readers, tokens]. What goes from one launch to the
next is one tensor; what other code reads are tensors of their own.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

# How many sources a launch takes: a kernel has at most 24 tensors, and those that other code reads are tensors of their own.
_CARRIED, _READ, _BUNDLE, _BACK = 20, 12, 16, 8
MOST_READERS = 4  # of a group: with more, the kernels that a compiler makes of its reads take over 24 tensors
MOST_ENTRIES = 1 << 14  # readers x D: so much of a program's sums fits into registers
_PROGRAMS = 256  # that share the tokens of a backward launch, each with its own sum for the keys
_PART = 512  # of the features at a time, where a source meets the keys
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def runs_on(x: Tensor) -> bool:
    """Whether there are kernels for where `x` lives."""
    return _HAS_TRITON and x.device.type == "cuda"


@triton_op("resfx::group_read", mutates_args={})
def group_read(
    sources: Sequence[Tensor], keys: Tensor, eps: float, with_sum: bool
) -> tuple[list[Tensor], Tensor, Tensor]:
    """V [tokens, D] of every reader, in the dtype of the sources, L [readers, tokens] in that of the keys, and the sum of the sources:
    empty without `with_sum`.
    """
    from resfx.passes.group_triton import carry_kernel, read_kernel

    (tokens, size), readers = sources[0].shape, keys.shape[0]
    lse, before = keys.new_empty(readers, tokens), keys  # not read at first
    *firsts, (start, stop) = read_launches(len(sources))
    for first, end in firsts:
        values = sources[0].new_empty(readers + with_sum, tokens, size)
        others, has = (keys, before, lse, values), {"HAS_SUM": with_sum, "CONTINUES": first > 0}
        _launch(carry_kernel, tokens, _filled(sources[first:end], _CARRIED), others, end - first, eps, **has)
        before = values
    results = [sources[0].new_empty(tokens, size) for _ in range(readers)]
    state = sources[0].new_empty(*((tokens, size) if with_sum else (0,)))
    part, has = (
        [*_filled(sources[start:stop], _READ), *_with_spare(results)],
        {"HAS_SUM": with_sum, "CONTINUES": start > 0},
    )
    _launch(read_kernel, tokens, part, (keys, before, lse, state), stop - start, eps, **has)
    return results, lse, state


def read_launches(sources: int) -> list[tuple[int, int]]:
    """The parts of the sources that are read by one launch each."""
    first = max(sources - _READ, 0)
    starts = range(0, first, _CARRIED)
    return [*((start, min(start + _CARRIED, first)) for start in starts), (first, sources)]


@triton_op("resfx::group_read_backward", mutates_args={})
def group_read_backward(
    sources: Sequence[Tensor],
    older: int,
    keys: Tensor,
    eps: float,
    lse: Tensor,
    to_values: Tensor,
    to_totals: Tensor,
    to_state: Tensor | None,
    later: Sequence[Tensor],
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """The gradients of the first `older` sources, one tensor [n, tokens, D] for each of `bundles`, of the others, and of the keys.

    `to_state`: the gradient of the sum. `later`: what readers of later groups have found for all sources, in bundles; it is added.
    """
    from resfx.passes.group_triton import back_kernel, back_older_kernel

    (tokens, size), readers = sources[0].shape, keys.shape[0]
    to_older = [sources[0].new_empty(stop - start, tokens, size) for start, stop in bundles(older)]
    results = [sources[0].new_empty(tokens, size) for _ in range(len(sources) - older)]
    to_keys = []

    def launch(kernel: Any, tensors: list[Tensor], start: int, stop: int) -> None:
        for_keys, bundle = keys.new_empty(_PROGRAMS, readers, size), start // _BUNDLE
        others = (keys, lse, to_values, to_totals, keys if to_state is None else to_state)
        more = later[bundle] if later else keys
        has = {"HAS_SUM": to_state is not None, "HAS_LATER": bool(later)}
        _launch(kernel, _PROGRAMS, tensors, (*others, more, for_keys), stop - start, eps, start % _BUNDLE, **has)
        to_keys.append(for_keys.sum(0))

    for (start, stop), out in zip(bundles(older), to_older, strict=True):
        launch(back_older_kernel, [*_filled(sources[start:stop], _BUNDLE), out], start, stop)
    for start, stop in bundles(len(sources)):
        for first in range(max(start, older), stop, _BACK):
            end = min(first + _BACK, stop)
            own = _with_spare(results[first - older : end - older])
            launch(back_kernel, [*_filled(sources[first:end], _BACK), *own], first, end)
    return to_older, results, torch.stack(to_keys).sum(0)


def bundles(sources: int) -> list[tuple[int, int]]:
    """The parts of the sources whose gradients go from one group to the next in a tensor of their own."""
    return [(start, min(start + _BUNDLE, sources)) for start in range(0, sources, _BUNDLE)]


def _filled(sources: Sequence[Tensor], count: int) -> list[Tensor]:
    """As many tensors as a kernel takes; the last ones are not read."""
    return [*sources, *[sources[-1]] * (count - len(sources))]


def _with_spare(results: Sequence[Tensor]) -> list[Tensor]:
    """As many tensors as a kernel takes; the last ones are not written."""
    return [*results, *(results[0].new_empty(1) for _ in range(_BACK - len(results)))]


def _launch(
    kernel: Any,
    programs: Any,
    tensors: Sequence[Tensor],
    others: tuple[Tensor, ...],
    count: int,
    *scalars: float,
    **has: bool,
) -> None:
    options = kernel_options(*others[0].shape)
    wrap_triton(kernel)[(programs,)](*tensors, *others, count, tensors[0].shape[0], *scalars, **options, **has)


def kernel_options(readers: int, size: int) -> dict[str, int]:
    """What a kernel is compiled for: readers and features, also as powers of 2, and how many warps share their sums."""
    rows, width = (1 << (n - 1).bit_length() for n in (readers, size))
    warps = min(max(rows * width // 1024, 1), 16)
    return {"READERS": readers, "SIZE": size, "R": rows, "D": width, "PART": min(width, _PART), "num_warps": warps}


def _by_sample(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.vmap of one of the operators, one sample after the other."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        samples = [
            function(*(_of_sample(arg, axis, index) for arg, axis in zip(args, in_dims, strict=True)))
            for index in range(info.batch_size)
        ]
        together = tuple(_stacked(results) for results in zip(*samples, strict=True))
        return together, tuple([0] * len(t) if isinstance(t, list) else 0 for t in together)

    return rule


def _of_sample(arg: Any, axis: Any, index: int) -> Any:
    if isinstance(arg, (list, tuple)):
        axes = axis if isinstance(axis, (list, tuple)) else [axis] * len(arg)
        return [_of_sample(entry, at, index) for entry, at in zip(arg, axes, strict=True)]
    return arg if axis is None else arg.select(axis, index).contiguous()


def _stacked(results: Sequence[Any]) -> Any:
    if isinstance(results[0], (list, tuple)):
        return [torch.stack(parts) for parts in zip(*results, strict=True)]
    return torch.stack(list(results))


group_read.register_vmap(_by_sample(group_read))
group_read_backward.register_vmap(_by_sample(group_read_backward))
