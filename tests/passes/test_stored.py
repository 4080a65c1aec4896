"""What compilers are told to keep in memory, and what it leaves as it is: every number and every gradient."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from passes_toys import relative
from torch import Tensor

from resfx.passes import group_kernels, ops
from resfx.passes.statistics import list_softmax
from resfx.passes.stored import scaled_sum, stored, stored_to_train
from resfx.passes.streams_again import streams_again

EPS = 1e-6


def write(w_alpha: Tensor, w_beta: Tensor, b_beta: Tensor, u: Tensor, *streams: Tensor) -> Tensor:
    """One write of MultiGate, and what is read after it, from a view with an offset."""
    mixed = ops.independent_mix(streams, u, w_beta, b_beta, EPS, -1)
    return torch.cat([ops.pool(mixed, w_alpha, EPS, -1)[:, 1:], mixed[0].sum().expand_as(u)], 1)


def formula(w_alpha: Tensor, w_beta: Tensor, b_beta: Tensor, u: Tensor, *streams: Tensor) -> Tensor:
    """The same over a stack."""
    s = torch.stack(streams)

    def rms(x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS) / x.shape[-1] ** 0.5

    b = torch.sigmoid((rms(s) * w_beta).sum(-1, keepdim=True) + b_beta.reshape(-1, 1, 1, 1))
    s = (1 - b) * s + b * u
    p = (rms(s) * w_alpha).sum(-1, keepdim=True).softmax(0)
    return torch.cat([(p * s).sum(0)[:, 1:], s[0].sum().expand_as(u)], 1)


def inputs() -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shapes = [(6,), (6,), (3,), *[(2, 3, 6)] * 4]
    return tuple(torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes)


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_write_of_multi_gate(backend: str | None) -> None:
    tensors = inputs()
    ours = write if backend is None else torch.compile(write, backend=backend, fullgraph=True)
    actual, expected = ours(*tensors), formula(*tensors)
    assert relative(actual, expected) < 1e-12
    g = torch.randn_like(expected)
    for a, e in zip(torch.autograd.grad(actual, tensors, g), torch.autograd.grad(expected, tensors, g), strict=True):
        assert relative(a, e) < 1e-11
    with torch.no_grad():
        assert relative(ours(*tensors), expected) < 1e-12


def on_a_gpu(x: Tensor) -> bool:
    """A function, for Dynamo looks into it."""
    return True


def two_writes(w_alpha: Tensor, w_beta: Tensor, other: Tensor, u: Tensor, *streams: Tensor, gate: str) -> Tensor:
    """As MultiGate emits them: every second mixing write makes the streams of the one before again."""
    mix = ops.independent_mix if gate == "independent" else ops.competitive_mix
    mixed, later = mix(streams, u, w_beta, other, EPS, -1), u.sin()
    again = streams_again(mixed, gate, streams, u, w_beta, other, EPS, -1, later)
    return torch.cat([ops.pool(mixed, w_alpha, EPS, -1), *mix(again, later, 2 * w_beta, other, EPS, -1)])


@pytest.mark.parametrize("gate", ["independent", "competitive"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_streams_of_a_write_are_made_again_in_an_inference_on_a_gpu(backend: str, gate: str) -> None:
    w_alpha, w_beta, other, *rest = inputs()
    tensors = (w_alpha, w_beta, other if gate == "independent" else other[:1], *rest)
    expected = two_writes(*tensors, gate=gate)
    graphs = []

    def keep(graph: torch.fx.GraphModule, given: list[Tensor]) -> object:
        graphs.append(sum("not_before" in str(node.target) for node in graph.graph.nodes))
        return torch._dynamo.lookup_backend(backend)(graph, given)

    compiled = torch.compile(two_writes, backend=keep, fullgraph=True)
    with mock.patch.object(group_kernels, "runs_on", on_a_gpu):
        actual = compiled(*tensors, gate=gate)
        with torch.no_grad():
            assert relative(compiled(*tensors, gate=gate), expected) < 1e-12
    assert graphs == [0, 3]
    g = torch.randn_like(expected)
    for a, e in zip(torch.autograd.grad(actual, tensors, g), torch.autograd.grad(expected, tensors, g), strict=True):
        assert relative(a, e) < 1e-11


def test_outside_of_a_compiler_nothing_happens() -> None:
    x = torch.randn(3, requires_grad=True)
    assert stored(x) is x
    assert stored_to_train(x) is x
    program = torch.export.export(_Write(), tuple(t.detach() for t in inputs()))
    assert not [node for node in program.graph.nodes if "stored" in str(node.target)]


class _Write(torch.nn.Module):
    def forward(self, *tensors: Tensor) -> Tensor:
        return write(*tensors)


def test_a_softmax_of_large_logits() -> None:
    logits = [torch.tensor([[800.0]]), torch.tensor([[-900.0]]), torch.tensor([[799.0]])]
    assert torch.allclose(torch.stack(list_softmax(logits)), torch.stack(logits).softmax(0))


@pytest.mark.parametrize("factor", [0.0, 0.3, -1.7, 1e-4])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_scaled_sum_is_the_sum(backend: str, factor: float) -> None:
    h, u, g = (torch.randn(2, 3, 6, dtype=torch.float64) for _ in range(3))
    tensors = h.requires_grad_(), u.requires_grad_()
    actual = torch.compile(scaled_sum, backend=backend, fullgraph=True)(*tensors, factor)
    expected = h + factor * u
    assert relative(actual, expected) < 1e-14
    for a, e in zip(torch.autograd.grad(actual, tensors, g), (g, factor * g), strict=True):
        assert torch.allclose(a, e, rtol=1e-14, atol=0)


def test_a_scaled_sum_under_vmap() -> None:
    h, u = torch.randn(4, 3, 6), torch.randn(4, 3, 6)

    def each(h: Tensor, u: Tensor) -> Tensor:
        return scaled_sum(h, u, 0.5)

    mapped = torch.compile(torch.func.vmap(each), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(mapped(h, u), h + 0.5 * u)
