"""What a compiler should write to memory: values that many later nodes read.

Left to itself Inductor keeps what such a value was computed from, a wide copy or all of its sources, which every reader then reads again;
a form's cost is memory traffic, so that costs whole passes. Outside of `torch.compile` these functions return their argument.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def compiling() -> bool:
    """Whether a compiler takes what runs now; an exporter is none."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


def stored(x: Tensor) -> Tensor:
    """`x`, written once in its own dtype, and so its gradient."""
    if not compiling():
        return x
    kept: Tensor = torch.ops.resfx.stored(x)
    return kept


def stored_to_train(x: Tensor) -> Tensor:
    """`stored`, where the backward needs `x` too; inference computes it on its way."""
    return stored(x) if x.requires_grad else x


def not_before(x: Tensor, other: Tensor) -> Tensor:
    """`x`, for something that is computed only where `other` [like `x`] is at hand.

    A value of its own: what a compiler has computed of `x` before is computed again, where that takes less than to store and read it.
    """
    if not compiling():
        return x
    held: Tensor = torch.ops.resfx.not_before(x, other)
    return held


def scaled_sum(h: Tensor, u: Tensor, factor: float) -> Tensor:
    """h + factor u. Compiled, the backward writes factor g alone, which u's products read; who goes on with g divides."""
    if not compiling() or not 1 / _MILD <= abs(factor) <= _MILD:
        return h + factor * u
    total: Tensor = _ScaledSum.apply(h, u, factor)
    return total


# A factor beyond it could bring a gradient in half precision to the end of its range.
_MILD = 64.0


class _ScaledSum(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor, u: Tensor, factor: float) -> Tensor:
        return h + factor * u

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        _, _, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        scaled = ctx.factor * g
        return scaled / ctx.factor, scaled, None


@torch.library.custom_op("resfx::stored", mutates_args=())
def _stored(x: Tensor) -> Tensor:
    """A copy, for compilers that do not know the operator; Inductor makes none."""
    return x.clone()


@_stored.register_fake
def _(x: Tensor) -> Tensor:
    _tell_inductor()
    return torch.empty_like(x)


@_stored.register_vmap
def _(info: Any, in_dims: tuple[int | None], x: Tensor) -> tuple[Tensor, int | None]:
    return torch.ops.resfx.stored(x), in_dims[0]


@torch.library.custom_op("resfx::not_before", mutates_args=())
def _not_before(x: Tensor, other: Tensor) -> Tensor:
    return x.clone()


@_not_before.register_fake
def _(x: Tensor, other: Tensor) -> Tensor:
    _tell_inductor()
    return torch.empty_like(x)


@_not_before.register_vmap
def _(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, other: Tensor) -> tuple[Tensor, int | None]:
    return x.clone(), in_dims[0]


@functools.cache
def _tell_inductor() -> None:
    """What the operators are to Inductor: their argument, as a buffer, or read from there beside the other one. There is no public name for
    that; asked for at the first graph, to keep `import resfx` light."""
    from torch._inductor.ir import Pointwise
    from torch._inductor.lowering import register_lowering

    @register_lowering(torch.ops.resfx.stored.default, type_promotion_kind=None)
    def realize(x: Any) -> Any:
        x.realize()
        return x

    @register_lowering(torch.ops.resfx.not_before.default, type_promotion_kind=None)
    def hold(x: Any, other: Any) -> Any:
        x.realize()
        load, wait = x.make_loader(), other.make_loader()

        def inner(index: Any) -> Any:
            wait(index)
            return load(index)

        return Pointwise.create(device=x.get_device(), dtype=x.get_dtype(), inner_fn=inner, ranges=x.get_size())


def _to_gradient(ctx: Any, g: Tensor) -> Tensor:
    kept: Tensor = torch.ops.resfx.stored(g)
    return kept


_stored.register_autograd(_to_gradient)
