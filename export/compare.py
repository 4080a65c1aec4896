"""Are two lists of outputs the same numbers? One rule for every lowering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from resfx.export.errors import OutputMismatchError

# Relative norm ||got - want|| / ||want|| allowed, by the dtype of the outputs. Another summation order moves float32
# outputs (unit round-off 6e-8) by 1e-7 to 2e-6 even at depth; a wrong epsilon, a tanh for an erf GELU or a lost term
# move them by 1e-4 and more. The other dtypes keep the same distance to their own round-off.
NORM_TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
# One element may be off by this many tolerances of (root mean square + its own size): a single wrong element in a large
# output hides from the norm.
ELEMENT_FACTOR = 20.0


@dataclass(frozen=True)
class Difference:
    """How far one output is from the model's own. `norm` is relative; `largest` is absolute."""

    name: str
    norm: float
    largest: float


def tolerance_for(tensors: Sequence[Tensor], wish: float | None = None) -> float:
    """The relative norm allowed: the user's wish, else that of the coarsest floating dtype among `tensors`."""
    if wish is not None:
        return wish
    allowed = [NORM_TOLERANCE.get(t.dtype, NORM_TOLERANCE[torch.float32]) for t in tensors if t.is_floating_point()]
    return max(allowed, default=0.0)


def compare(
    names: Sequence[str], got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float, where: str
) -> tuple[Difference, ...]:
    """The difference of every output.

    Floating outputs must agree in relative norm (`tolerance`) and element by element; infinities and NaNs stand in the
    same places; integers and booleans are equal. Raises OutputMismatchError at the first output that does not.
    """
    if len(got) != len(want):
        raise OutputMismatchError(f"{where} returns {len(got)} outputs, the model {len(want)}", output="")
    return tuple(
        _difference(f"output '{name}' (number {i}) of {where}", name, a, b, tolerance)
        for i, (name, a, b) in enumerate(zip(names, got, want, strict=True))
    )


def _difference(what: str, name: str, got: Tensor, want: Tensor, tolerance: float) -> Difference:
    got, want = got.detach().cpu(), want.detach().cpu()
    if got.shape != want.shape or got.dtype != want.dtype:
        raise OutputMismatchError(
            f"{what} is {got.dtype} {tuple(got.shape)}; the model returns {want.dtype} {tuple(want.shape)}", output=name
        )
    if want.numel() == 0:
        return Difference(name, 0.0, 0.0)
    exact = not (want.is_floating_point() or want.is_complex())
    wide = torch.complex128 if want.is_complex() else torch.float64
    a, b = got.to(wide), want.to(wide)
    finite = torch.isfinite(a) & torch.isfinite(b)
    # Where one side is infinite or NaN only the same value will do.
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    gap = torch.where(finite, (a - b).abs(), torch.where(same, 0.0, torch.inf))
    size = torch.where(torch.isfinite(b), b.abs(), 0.0)
    total = float(torch.linalg.vector_norm(size))
    off = float(torch.linalg.vector_norm(gap))
    norm = off / total if total > 0 else off
    allowed = 0.0 if exact else tolerance
    limit = ELEMENT_FACTOR * allowed * (total / want.numel() ** 0.5 + size)
    if norm <= allowed and bool((gap <= limit).all()):
        return Difference(name, norm, float(gap.max()))
    raise _mismatch(what, name, got, want, gap, norm, allowed)


def _mismatch(
    what: str, name: str, got: Tensor, want: Tensor, gap: Tensor, norm: float, allowed: float
) -> OutputMismatchError:
    index = tuple(int(i) for i in torch.unravel_index(gap.argmax(), gap.shape))
    place = f" at {list(index)}" if index else ""
    return OutputMismatchError(
        f"{what} differs most{place}: {got[index].item()} here, {want[index].item()} from the model; "
        f"largest absolute difference {float(gap.max()):.3g}, relative norm {norm:.3g} (allowed {allowed:.3g})",
        output=name,
        index=index,
    )
