"""What test_group_read.py asks of the kernels, which Triton's interpreter runs here: TRITON_INTERPRET=1 python group_probe.py PART DTYPE.

Prints deviations as JSON: of norms, from the formula in float64; `gradients` less what the
formula has in the same dtype.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
from passes_toys import Toy, capture, perturb, stream_of
from torch import Tensor

from resfx import AttentionResidual, DeltaAttention
from resfx.passes import apply, group_kernels, ops
from resfx.passes.group_kernels import bundles, read_launches

EPS, WIDTH, TOKENS = 1e-6, 20, (2, 3)
FORMS = [
    DeltaAttention(),
    DeltaAttention(granularity="block", block_size=4),
    DeltaAttention(null_source=True, gate="scalar"),
    AttentionResidual(),
    AttentionResidual(granularity="block", block_size=3),
]


def deviation(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def two_groups(*tensors: Tensor, first: int, shared: int, readers: int, by_kernel: bool) -> Tensor:
    """Readers of the first sources, then readers of more of them, each with later sources of its own; and the sums."""
    keys, sources = tensors[: 2 * readers], list(tensors[2 * readers :])
    ones = torch.ones_like(keys[0])
    early, late = keys[:readers], keys[readers:]
    with mock.patch.object(group_kernels, "runs_on", return_value=by_kernel):
        one = ops.group_read([], sources[:first], early, [ones] * readers, EPS, -1, True, False)
        two = ops.group_read(one[0], sources[first:shared], late, [ones] * readers, EPS, -1, False, True)
    assert bool(one[2]) == bool(two[2]) == by_kernel
    assert not two[0]
    found = [0.3 * ops.sum_of(one[1], torch.stack(sources[:first]).sum(0))]
    for r in range(readers):
        own = sources[: first + min(r, shared - first)]
        found.append(ops.grouped_delta_read(sources[0], own, early[r], ones, EPS, -1, one[2 + r], first))
        own = sources[: shared + r]
        found.append(ops.grouped_routed_read(own, late[r], ones, EPS, -1, None, two[2 + r], shared))
    return torch.stack(found)


def tensors_of(readers: int, sources: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    keys = [torch.randn(WIDTH) / WIDTH**0.5 for _ in range(2 * readers)]  # scores of the order of 1
    streams = [torch.randn(*TOKENS, WIDTH) for _ in range(sources)]
    return [t.to(dtype).requires_grad_() for t in [*keys, *streams]]


def gradients(dtype: torch.dtype) -> dict[str, float]:
    found = {}
    for readers, first, shared in ((1, 2, 3), (2, 2, 13), (3, 12, 18), (8, 9, 33)):
        assert (readers < 8) or (len(read_launches(shared)) == 3 and len(bundles(shared)) == 3)
        exact = tensors_of(readers, shared + readers - 1, dtype)
        results = []
        for kind, by_kernel in ((dtype, True), (dtype, False), (torch.float64, False)):
            tensors = [t.detach().to(kind).requires_grad_() for t in exact]
            layout = {"first": first, "shared": shared, "readers": readers, "by_kernel": by_kernel}
            out = two_groups(*tensors, **layout)
            g = torch.linspace(-1, 2, out.numel()).sin().reshape(out.shape).bfloat16().to(kind)
            results.append([out, *torch.autograd.grad(out, tensors, g)])
        for index, (actual, plain, expected) in enumerate(zip(*results, strict=True)):
            found[f"{readers} readers, {index}"] = deviation(actual, expected) - deviation(plain, expected)
    return found


def derivatives(dtype: torch.dtype) -> dict[str, float]:
    results: list[dict[str, Tensor]] = []
    for by_kernel in (True, False):
        tensors = tensors_of(2, 5, dtype)

        def read(*tensors: Tensor, by_kernel: bool = by_kernel) -> Tensor:
            return two_groups(*tensors, first=2, shared=4, readers=2, by_kernel=by_kernel)

        first = torch.autograd.grad(read(*tensors).sin().sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), tensors)
        plain = [t.detach() for t in tensors]
        axes = (*[None] * 4, *[0] * 5)
        vmapped = torch.func.vmap(torch.func.grad(lambda *t: read(*t).square().sum(), 5), axes)(*plain)
        results.append({"second": torch.cat([t.flatten() for t in second]), "vmap": vmapped})
    found = {name: deviation(results[0][name], results[1][name]) for name in results[0]}
    tangents = [torch.cos(7 * t) for t in plain]
    jvps = []
    for by_kernel in (True, False):
        with mock.patch.object(group_kernels, "runs_on", return_value=by_kernel):
            # Where forward-mode derivatives are taken no kernel runs.
            jvps.append(torch.func.jvp(lambda *t: _one_group(*t), tuple(plain), tuple(tangents))[1])
    return {**found, "forward": deviation(*jvps)}


def _one_group(*tensors: Tensor) -> Tensor:
    keys, sources, ones = tensors[:2], list(tensors[4:]), torch.ones_like(tensors[0])
    group = ops.group_read([], sources[:3], keys, [ones] * 2, EPS, -1, False, True)
    reads = [ops.grouped_routed_read(sources[: 3 + r], keys[r], ones, EPS, -1, None, group[2 + r], 3) for r in (0, 1)]
    return torch.stack(reads)


def model(dtype: torch.dtype) -> dict[str, float]:
    """Every form of two kinds in a model of 14 sublayers: output and gradients."""
    found = {}
    for form in FORMS:
        results = []
        for by_kernel in (True, False):
            torch.manual_seed(0)
            x = torch.randn(2, 3, 8, dtype=dtype)
            graph_module = capture(Toy(layers=14, d=8).to(dtype), x)
            apply(graph_module, stream_of(graph_module), form)
            perturb(graph_module)
            assert any(node.target is ops.group_read for node in graph_module.graph.nodes), form
            with mock.patch.object(group_kernels, "runs_on", return_value=by_kernel):
                out = graph_module(x)
                out.sin().sum().backward()
            grads = [p.grad.flatten() for _, p in sorted(graph_module.named_parameters()) if p.grad is not None]
            results.append((out, torch.cat(grads)))
        for name, actual, expected in zip(("output", "gradients"), *results, strict=True):
            found[f"{form.to_spec()} {name}"] = deviation(actual, expected)
    return found


if __name__ == "__main__":
    part = {"gradients": gradients, "derivatives": derivatives, "model": model}[sys.argv[1]]
    print(json.dumps(part(getattr(torch, sys.argv[2]))))
