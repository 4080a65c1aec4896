"""warm_start=True: identical at init, and every new parameter has a gradient by the third backward."""

from __future__ import annotations

import pytest
import torch
from passes_reference import EventModel
from passes_toys import capture, relative, stream_of
from test_events import CONV, MODELS, build

from resfx.passes import AttentionResidual, DeltaAttention, Highway, MultiGate, Review, ScaledLoop, apply
from resfx.passes.form import Form

FORMS: list[Form] = [
    DeltaAttention(),
    DeltaAttention(seeded=True, null_source=True, gate="vector"),
    DeltaAttention(gate="alpha", granularity="block", block_size=2),
    DeltaAttention(granularity="block", block_size=1, official_sources=True),
    AttentionResidual(),
    AttentionResidual(granularity="block", block_size=2),
    MultiGate(streams=2),
    Review(),
    Highway(),
    Highway(convex=True),
    ScaledLoop(),
    ScaledLoop(learnable=True, lam=3.0),
]
NAMES = ["pre", "post", "slice", "taps", "tied", "flip", "side", "scale", "conv_relu"]


def rewritten(name: str, form: Form) -> tuple[EventModel, torch.fx.GraphModule, tuple[torch.Tensor, ...]]:
    model, inputs, axis = build(name)
    graph_module = capture(model, *inputs)
    assert apply(graph_module, stream_of(graph_module, axis), form, warm_start=True)
    return model, graph_module, inputs


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.to_spec())
@pytest.mark.parametrize("name", NAMES)
def test_identical_at_init(name: str, form: Form) -> None:
    model, graph_module, inputs = rewritten(name, form)
    for actual, plain in zip(graph_module(*inputs), model(*inputs), strict=True):
        assert relative(actual, plain) < 1e-14


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.to_spec())
@pytest.mark.parametrize("name", ["pre", "post"])
def test_gradients_by_the_third_backward(name: str, form: Form) -> None:
    _, graph_module, inputs = rewritten(name, form)
    new = {n: p for n, p in graph_module.named_parameters() if n.startswith("residual.")}
    optimizer = torch.optim.SGD(graph_module.parameters(), lr=0.05)
    seen: set[str] = set()
    for _ in range(3):
        optimizer.zero_grad()
        sum((o * torch.linspace(-1, 1, o.numel()).reshape(o.shape)).sum() for o in graph_module(*inputs)).backward()
        seen |= {n for n, p in new.items() if p.grad is not None and p.grad.abs().max() > 0}
        optimizer.step()
    assert seen == set(new)


def test_alpha_gate_has_no_warm_parameter() -> None:
    _, graph_module, _ = rewritten("pre", DeltaAttention(gate="alpha"))
    assert not [n for n, _ in graph_module.named_parameters() if n.endswith(".warm")]


def test_without_warm_start_the_function_differs() -> None:
    model, inputs, axis = build("post")
    graph_module = capture(model, *inputs)
    apply(graph_module, stream_of(graph_module, axis), DeltaAttention())
    assert relative(graph_module(*inputs)[0], model(*inputs)[0]) > 1e-3


def test_the_names_exist() -> None:
    assert set(NAMES) <= {*MODELS, *CONV}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scaled_loop_starts_bit_exact(dtype: torch.dtype) -> None:
    """lam = N sqrt(L) is rounded in half precision; the factor is 1 all the same."""
    model, inputs, axis = build("pre")
    model, inputs = model.to(dtype), tuple(i.to(dtype) for i in inputs)
    graph_module = capture(model, *inputs)
    apply(graph_module, stream_of(graph_module, axis), ScaledLoop(), warm_start=True)
    assert torch.equal(graph_module(*inputs)[0], model(*inputs)[0])
