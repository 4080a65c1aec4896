"""The hand-derived gradients of a routed read against torch's own, in eager, compiled, transformed and exported use."""

from __future__ import annotations

import operator

import pytest
import torch
from passes_toys import relative
from torch import Tensor

from resfx.passes import ops, routing
from resfx.passes.statistics import wide

EPS = 1e-6


def inputs(dim: int, dtype: torch.dtype = torch.float64, count: int = 4) -> tuple[Tensor, ...]:
    """key, then sources of unlike size, [3, 6] vectors along `dim`."""
    torch.manual_seed(0)
    shape = (3, 2, 6) if dim == -1 else (3, 6, 2)
    values = [10.0**k * torch.randn(shape).to(dtype) for k in range(-2, count - 2)]
    return tuple(t.requires_grad_() for t in (torch.randn(6).to(dtype), *values))


def plain(key: Tensor, *sources: Tensor, dim: int = -1) -> Tensor:
    """The state plus the read, as a formula over stacked sources."""
    v = torch.stack([wide(source) for source in sources])
    axis = dim if dim < 0 else dim + 1
    shape = [1] * v.dim()
    shape[axis] = -1
    key = wide(key).reshape(shape)
    rms = v * torch.rsqrt((v * v).mean(axis, keepdim=True) + EPS)
    a = (rms * key).sum(axis, keepdim=True).softmax(0)
    return v[0] + (a * v).sum(0)


def ours(key: Tensor, *sources: Tensor, dim: int = -1) -> Tensor:
    """The first source is added once more, as a state is."""
    ones = torch.ones_like(key)
    return routing.mixture(sources, key, ones, EPS, dim, dtype=wide(key).dtype, onto=sources[0])


def gradients(read, tensors: tuple[Tensor, ...], dim: int) -> list[Tensor]:  # type: ignore[no-untyped-def]
    out = read(*tensors, dim=dim)
    g = torch.linspace(-1, 2, out.numel()).reshape(out.shape).sin().bfloat16().to(out.dtype)  # the same in every dtype
    return [out, *torch.autograd.grad(out, tensors, g)]


@pytest.mark.parametrize("dim", [-1, 1])
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_are_those_of_the_formula(dim: int, backend: str | None) -> None:
    tensors = inputs(dim)
    read = ours if backend is None else torch.compile(ours, backend=backend, fullgraph=True)
    for actual, expected in zip(gradients(read, tensors, dim), gradients(plain, tensors, dim), strict=True):
        assert relative(actual, expected) < 1e-12


def test_compiled_without_gradients() -> None:
    tensors = inputs(-1)
    read = torch.compile(ours, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert relative(read(*tensors), plain(*tensors)) < 1e-12
    frozen = [t.detach() for t in tensors]
    assert relative(read(*frozen), plain(*tensors)) < 1e-12
    partly = [frozen[0], *tensors[1:]]
    (gradient,) = torch.autograd.grad(read(*partly).sum(), partly[1:2])
    (expected,) = torch.autograd.grad(plain(*partly).sum(), partly[1:2])
    assert relative(gradient, expected) < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_half_precision_are_rounded_once(dtype: torch.dtype) -> None:
    """Computed in float32: as close to the exact ones as their own dtype allows."""
    halves = inputs(-1, dtype)
    exact = tuple(t.detach().double().requires_grad_() for t in halves)
    _, *actual = gradients(ours, halves, -1)
    _, *expected = gradients(plain, exact, -1)
    for a, e, t in zip(actual, expected, halves, strict=True):
        assert a.dtype == t.dtype
        assert relative(a.double(), e) < torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_read_without_a_state(dtype: torch.dtype) -> None:
    """Its result is rounded once, and so are the gradients that a narrow one gives."""
    key, *sources = inputs(-1, dtype)
    exact = tuple(t.detach().double().requires_grad_() for t in (key, *sources))

    def read(key: Tensor, *sources: Tensor, dim: int) -> Tensor:
        return ops.routed_read(sources, key, torch.ones_like(key), EPS, dim)

    def formula(key: Tensor, *sources: Tensor, dim: int) -> Tensor:
        return plain(key, *sources, dim=dim) - sources[0]

    for actual, expected in zip(gradients(read, (key, *sources), -1), gradients(formula, exact, -1), strict=True):
        assert actual.dtype == dtype
        assert relative(actual.double(), expected) < (1e-12 if dtype == torch.float64 else 2**-7)


def test_first_and_second_derivatives_numerically() -> None:
    tensors = tuple((t / t.detach().norm()).detach().requires_grad_() for t in inputs(-1, count=3))
    assert torch.autograd.gradcheck(ours, tensors)
    assert torch.autograd.gradgradcheck(ours, tensors)


def test_forward_mode_and_vmap_are_torch_s_own() -> None:
    key, *sources = (t.detach() for t in inputs(-1))
    tangents = tuple(torch.randn_like(t) for t in (key, *sources))
    _, actual = torch.func.jvp(ours, (key, *sources), tangents)
    _, expected = torch.func.jvp(plain, (key, *sources), tangents)
    assert relative(actual, expected) < 1e-12
    per_sample = torch.func.vmap(torch.func.grad(lambda k, *v: ours(k, *v).square().sum(), 0), (None, 0, 0, 0, 0))
    expected = torch.stack(
        [torch.func.grad(lambda k, *v: plain(k, *v).square().sum())(key, *rows) for rows in zip(*sources, strict=True)]
    )
    assert relative(per_sample(key, *sources), expected) < 1e-12


def test_nothing_but_the_inputs_is_saved() -> None:
    """Of every token no copy of a source, wide or normed, is kept for the backward."""
    tensors = inputs(-1, torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ours(*tensors)
    large = {t.data_ptr() for t in saved if t.numel() > 6}
    assert large <= {t.data_ptr() for t in tensors}
    assert len(large) == len(tensors) - 1


def test_an_exported_read_is_plain_operations() -> None:
    class Read(torch.nn.Module):
        def forward(self, h: Tensor, u: Tensor, query: Tensor, key_norm: Tensor) -> Tensor:
            return ops.delta_read(h, [h, u], query, key_norm, EPS, -1)

    args = (torch.randn(2, 3, 6), torch.randn(2, 3, 6), torch.randn(6, requires_grad=True), torch.ones(6))
    for strict in (False, True):
        program = torch.export.export(Read(), args, strict=strict)
        targets = {node.target for node in program.graph.nodes if node.op == "call_function"} - {operator.getitem}
        assert all(isinstance(target, torch._ops.OpOverload) for target in targets), targets
        assert relative(program.module()(*args), Read()(*args)) < 1e-6
