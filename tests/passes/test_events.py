"""Every form under every event of a stream, against the eager reference: outputs and all gradients, in float64."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from passes_reference import EventModel, Step, reference
from passes_toys import capture, perturb, relative, stream_of
from torch import Tensor
from torch.fx import GraphModule

from resfx.passes import AttentionResidual, DeltaAttention, Highway, MultiGate, Review, ScaledLoop, Standard, apply
from resfx.passes.form import Form

S = [("site", k) for k in range(5)]
MODELS: dict[str, list[Step]] = {
    "pre": S[:5],
    "post": [step for k in range(4) for step in (("site", k), ("norm", k))],
    "relu": [step for k in range(3) for step in (("site", k), ("relu",))],
    "side": [("side",), S[0], ("side",), S[1], S[2], ("side",), S[3], ("side",)],
    "post_side": [S[0], ("norm", 0), S[1], ("side",), ("norm", 1), S[2], ("norm", 2)],
    "scale": [("scale", 0.5), S[0], ("scale", 1.5), S[1], ("div", 2.0), S[2], S[3], ("div", 3.0)],
    "slice": [S[0], ("slice", 1), S[2], ("slice", 3), S[4]],
    "taps": [("tap",), S[0], ("tap",), S[1], ("tap",), S[2], S[3], ("tap",)],
    "post_taps": [S[0], ("tap",), ("norm", 0), ("tap",), S[1], ("norm", 1), S[2], ("norm", 2), ("tap",)],
    "copies": [S[0], ("clone",), S[1], ("clone",), S[2], ("clone",)],
    "flip": [S[0], ("flip",), ("flipped_site", 1), ("flipped_site", 2), ("scale", 0.5), ("flip",), S[3], S[4]],
    "fold": [S[0], ("fold",), S[1], S[2], ("norm", 2), ("unfold",), S[3], S[4]],
    "tied": [S[0], S[1], S[0], S[1], S[0], S[1]],
    "one": S[:1],
}
CONV: dict[str, list[Step]] = {
    "conv": S[:4],
    "conv_relu": [step for k in range(4) for step in (("site", k), ("relu",))],
    "conv_side": [S[0], ("side",), S[1], ("scale", 0.5), S[2], ("tap",), S[3]],
}
FORMS: list[Form] = [
    Standard(),
    DeltaAttention(),
    DeltaAttention(seeded=True, null_source=True),
    DeltaAttention(gate="scalar"),
    DeltaAttention(gate="vector", null_source=True),
    DeltaAttention(gate="alpha", tied=True),
    DeltaAttention(granularity="block", block_size=2, seeded=True),
    DeltaAttention(granularity="block", blocks=1, gate="scalar"),
    DeltaAttention(granularity="block", block_size=1, official_sources=True),
    AttentionResidual(),
    AttentionResidual(tied=True),
    AttentionResidual(granularity="block", block_size=2),
    MultiGate(streams=3),
    MultiGate(streams=2, gate="competitive"),
    MultiGate(streams=1, tied=True),
    Review(),
    Review(tied=True),
    Highway(),
    Highway(convex=True),
    ScaledLoop(lam=0.7),
    ScaledLoop(learnable=True),
]


def build(name: str) -> tuple[EventModel, tuple[Tensor, Tensor], int]:
    torch.manual_seed(0)
    if name in CONV:
        model, x = EventModel(CONV[name], 6, conv=True), torch.randn(3, 6, 4, 5, dtype=torch.float64)
    else:
        model, x = EventModel(MODELS[name]), torch.randn(3, 4, 8, dtype=torch.float64)
    return model.double(), (x, torch.randn_like(x)), 1 if name in CONV else -1


def gradients(parameters: dict[str, Tensor], loss: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), grads, strict=True)}


def compare(graph_module: GraphModule, model: EventModel, form: Form, inputs: tuple[Tensor, Tensor]) -> None:
    own = dict(graph_module.named_parameters())
    expected = reference(form, model, lambda o, n: own.get(f"residual.0.{o}.{n}"), *inputs)
    actual = graph_module(*inputs)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert relative(a, e) < 1e-12
    loss = sum((o * torch.arange(o.numel()).reshape(o.shape).sin()).sum() for o in actual)
    expected_loss = sum((o * torch.arange(o.numel()).reshape(o.shape).sin()).sum() for o in expected)
    grads = gradients(own, loss)
    theirs = {**dict(model.named_parameters()), **{n: p for n, p in own.items() if n.startswith("residual.")}}
    wanted = gradients(theirs, expected_loss)
    # A scalar's gradient can cancel to nearly nothing; what it is rounded from is of the size of the others.
    least = 1e-6 * max(float(grad.norm()) for grad in wanted.values())
    for name, grad in wanted.items():
        if name.startswith("residual."):
            assert grad.norm() > 0, f"{name} has no influence"
        if name in grads:
            assert float((grads[name] - grad).norm()) < 1e-9 * max(float(grad.norm()), least), name


@functools.cache
def captured(name: str, dialect: str) -> GraphModule:
    model, inputs, _ = build(name)
    return capture(model, *inputs, dialect=dialect)


def run(name: str, form: Form, dialect: str) -> None:
    model, inputs, axis = build(name)
    graph_module = copy.deepcopy(captured(name, dialect))
    before = graph_module.code
    applied = apply(graph_module, stream_of(graph_module, axis), form)
    if not applied:
        assert "too shallow" in str(applied)
        assert graph_module.code == before
        return
    if isinstance(form, Standard):
        assert graph_module.code == before
    perturb(graph_module)
    compare(graph_module, model, form, inputs)
    if dialect == "aten":
        again = tuple(torch.cat([i, i * 0.3]) for i in inputs)
        compare(graph_module, model, form, again)


def pairs() -> list[object]:
    """Every form on every model; a third of them, in rotation, in the default run."""
    return [
        pytest.param(name, form, id=f"{name}-{form.to_spec()}", marks=[pytest.mark.slow] if (i + j) % 3 else [])
        for i, form in enumerate(FORMS)
        for j, name in enumerate([*MODELS, *CONV])
    ]


@pytest.mark.parametrize(("name", "form"), pairs())
def test_aten_graphs(name: str, form: Form) -> None:
    run(name, form, "aten")


@pytest.mark.parametrize("form", [DeltaAttention(), AttentionResidual(), MultiGate(streams=2), Review()], ids=str)
@pytest.mark.parametrize("name", [*MODELS, *CONV])
def test_fx_graphs(name: str, form: Form) -> None:
    run(name, form, "fx")
