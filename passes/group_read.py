"""Sources that several readers have in common, read once for all of them, where there are kernels for it.

For every reader r with its key k_r, over the sources v_j that exist before the first of the readers (see `routing`):

    L_r = logsumexp_j(z_rj),  e_rj = exp(z_rj - L_r),  V_r = sum_j e_rj v_j,  s_r = sum_j e_rj (1, but with a gradient)

What a reader makes of V, s and L doesn't depend on L, so L counts as a constant here: then the gradients of the sources don't depend on
each other, and one pass over each source, with the gradients of all readers at hand, gives its own:

    p_rj = dV_r . v_j,  dz_rj = e_rj (p_rj + ds_r),  dv_j = sum_r e_rj dV_r + dz_rj c_j (k_r - z_rj c_j v_j / D)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resfx.passes import group_kernels
from resfx.passes.routing import distinct, has_tangent, needs_gradients
from resfx.passes.statistics import inverse_rms, wide
from resfx.passes.stored import stored


def group_partials(
    earlier: Sequence[Tensor],
    sources: Sequence[Tensor],
    queries: Sequence[Tensor],
    key_norms: Sequence[Tensor],
    eps: float,
    dim: int,
    with_sum: bool,
    is_last: bool,
) -> list[list[Tensor]] | None:
    """What readers with these queries find in the sources of `earlier`, the first result of another call, and in `sources`, the later ones.

    Sources are like the stream, vectors are [D]. The results: for a later group (unless `is_last`) all sources, and what stands
    for them there, bundles [n, ..] of streams without memory whose gradients are theirs, from all later groups together; the sum of the
    sources (`with_sum`); the fields of an `Older` for each reader, V in the dtype of the first source. None where no kernel takes them.
    """
    if not _taken_by_a_kernel(sources, [*queries, *key_norms], dim):
        return None
    keys = torch.stack([wide(q) * wide(k) for q, k in zip(queries, key_norms, strict=True)])
    shape = sources[0].shape
    old, bundles = [x for x in earlier if x.dim() == len(shape)], [x for x in earlier if x.dim() > len(shape)]
    new = distinct(sources)
    layout = _Layout(shape, len(new), len(bundles), with_sum, is_last)
    inputs = [keys, *bundles, *new, *old]
    flat = _Group.apply(eps, layout, *inputs) if needs_gradients(inputs) else _partials(eps, layout, *inputs)
    count = len(queries)
    readers = [[keys[r], *flat[r : 3 * count : count]] for r in range(count)]
    total, rest = flat[3 * count : 3 * count + with_sum], flat[3 * count + with_sum :]
    return [[*old, *new, *rest] if rest else [], list(total), *readers]


def _taken_by_a_kernel(sources: Sequence[Tensor], vectors: Sequence[Tensor], dim: int) -> bool:
    first = sources[0]
    if torch.compiler.is_exporting() or not group_kernels.runs_on(first):
        return False
    if dim not in (-1, first.dim() - 1) or any(s.dtype != first.dtype or s.shape != first.shape for s in sources):
        return False
    return torch.compiler.is_compiling() or not has_tangent([*sources, *vectors])


def _rows(source: Tensor) -> Tensor:
    return source.reshape(-1, source.shape[-1]).contiguous()


class _Layout(NamedTuple):
    """Tensors like a stream of that shape: how many later sources, bundles of earlier ones; whether a sum and no bundles come out."""

    shape: torch.Size
    new: int
    bundles: int
    with_sum: bool
    is_last: bool

    def split(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The later and the earlier sources."""
        rest = tensors[self.bundles :]
        return rest[: self.new], rest[self.new :]


def _partials(eps: float, layout: _Layout, keys: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """V of every reader, then s, then L, like the stream or one per token; then the sum and the bundles."""
    new, old = layout.split(tensors)
    # Stored, for a compiler writes a source that it has not written yet once for every argument that it is.
    sources, shape = [_rows(stored(source)) for source in (*old, *new)], layout.shape
    values, lse, state = group_kernels.group_read(sources, keys, eps, layout.with_sum)
    scalars = lse.reshape(-1, *shape[:-1], 1)
    found = (*(v.reshape(shape) for v in values), *torch.ones_like(scalars).unbind(0), *scalars.unbind(0))
    if layout.with_sum:
        found = (*found, state.reshape(shape))
    if layout.is_last:
        return found
    nothing, parts = sources[0].new_zeros(()), group_kernels.bundles(len(sources))
    return *found, *(nothing.expand(stop - start, *shape) for start, stop in parts)


class _Group(torch.autograd.Function):
    """`_partials`, from keys [readers, D], the bundles of the earlier sources, the later sources and the earlier ones."""

    generate_vmap_rule = True

    @staticmethod
    def forward(eps: float, layout: _Layout, keys: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return _partials(eps, layout, keys, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.eps, ctx.layout, keys, *tensors = inputs
        new, old = ctx.layout.split(tensors)
        lse = output[2 * keys.shape[0] : 3 * keys.shape[0]]
        ctx.mark_non_differentiable(*lse)
        ctx.older = len(old)
        ctx.save_for_backward(keys, *old, *new, *lse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        keys, *tensors = ctx.saved_tensors
        count, older = keys.shape[0], ctx.older
        sources, lse = [_rows(source) for source in tensors[:-count]], torch.stack(tensors[-count:]).reshape(count, -1)
        to_totals = torch.stack(gradients[count : 2 * count]).reshape(count, -1)
        to_state = gradients[3 * count].reshape(sources[0].shape) if ctx.layout.with_sum else None
        later = [] if ctx.layout.is_last else gradients[3 * count + ctx.layout.with_sum :]
        later = [bundle.reshape(-1, *sources[0].shape) for bundle in later]
        # One buffer that each reader's gradient is written into, by whatever computes it: not a stack, which a compiler would copy into.
        to_values = torch.cat([stored(g) for g in gradients[:count]]).reshape(count, *sources[0].shape)
        plain = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        find = _differentiable if plain else group_kernels.group_read_backward
        to_older, to_new, to_keys = find(sources, older, keys, ctx.eps, lse, to_values, to_totals, to_state, later)
        shape = ctx.layout.shape
        to_bundles, to_new = [x.reshape(-1, *shape) for x in to_older], [x.reshape(shape) for x in to_new]
        return None, None, to_keys, *to_bundles, *to_new, *[None] * older


def _differentiable(
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
    """The backward in plain operations, for second derivatives."""
    g = wide(to_values)
    to_sources, to_keys, so_far = [], torch.zeros_like(keys), [x for part in later for x in part.unbind(0)]
    for index, source in enumerate(sources):
        v = wide(source)
        inverse = inverse_rms(v, eps, -1).squeeze(-1)
        scores = inverse * (keys @ v.T)
        power = (scores - lse).exp()
        slope = power * (torch.einsum("rtd,td->rt", g, v) + to_totals) * inverse
        back = (slope * scores).sum(0) * inverse / v.shape[-1]
        own = torch.einsum("rt,rtd->td", power, g) + slope.T @ keys - back[:, None] * v
        own = reduce(torch.add, [*so_far[index : index + 1], *([] if to_state is None else [to_state])], own)
        to_sources.append(own.to(source.dtype))
        to_keys = to_keys + slope @ v
    to_older = [torch.stack(to_sources[start:stop]) for start, stop in group_kernels.bundles(older)]
    return to_older, to_sources[older:], to_keys
