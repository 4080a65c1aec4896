"""Repeated streams and tied parameters: `ScaledLoop(loops=K)`, `tied=True`, and the growth that 1/N bounds."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from passes_reference import EventModel, reference
from passes_toys import Toy, capture, perturb, relative, stream_of
from test_events import CONV, MODELS, S, build, gradients
from torch import Tensor, nn
from torch.fx import GraphModule

from resfx.passes import (
    AttentionResidual,
    DeltaAttention,
    FormError,
    Highway,
    MultiGate,
    Plan,
    Review,
    ScaledLoop,
    apply,
    apply_all,
    from_spec,
)
from resfx.passes.form import Form
from resfx.passes.repeat import Repeat
from resfx.patterns import search

REPEATED = ["pre", "post", "relu", "side", "scale", "slice", "taps", "post_taps", "flip", "fold", "tied", "one"]
STEPS = {"taps": [S[0], ("tap",), S[1], S[2], ("tap",), S[3], ("tap",)]}  # none at the entry, which lies outside
TIED: list[Form] = [
    DeltaAttention(tied=True),
    DeltaAttention(tied=True, null_source=True, gate="vector", seeded=True),
    DeltaAttention(tied=True, granularity="block", block_size=2),
    AttentionResidual(tied=True),
    AttentionResidual(tied=True, granularity="block", blocks=2),
    MultiGate(tied=True, streams=2),
    MultiGate(tied=True, streams=2, gate="competitive"),
    Review(tied=True),
    Highway(tied=True),
    Highway(tied=True, convex=True),
]


def repeat_in(graph_module: nn.Module) -> Repeat:
    (found,) = [module for module in graph_module.modules() if isinstance(module, Repeat)]
    return found


@functools.cache
def captured(name: str) -> tuple[EventModel, GraphModule, tuple[Tensor, ...], int]:
    model, inputs, axis = build(name)
    if name in STEPS:
        model = EventModel(STEPS[name]).double()
    return model, capture(model, *inputs), inputs, axis


def looped(name: str, form: ScaledLoop, warm_start: bool = False) -> tuple[EventModel, GraphModule, tuple[Tensor, ...]]:
    model, graph_module, inputs, axis = captured(name)
    graph_module = copy.deepcopy(graph_module)
    names = list(graph_module.state_dict())
    applied = apply(graph_module, stream_of(graph_module, axis), form, warm_start=warm_start)
    assert applied, applied
    assert [n for n in graph_module.state_dict() if not n.startswith("residual.")] == names
    return model, graph_module, inputs


def unrolled(model: EventModel, loops: int) -> EventModel:
    """The same weights, the steps written down `loops` times."""
    written = copy.copy(model)
    written.steps = model.steps * loops
    return written


def last_repeat(outputs: tuple[Tensor, ...], loops: int) -> tuple[Tensor, ...]:
    """The end, and of the taps those of the last repeat."""
    end, *taps = outputs
    return (end, *taps[len(taps) - len(taps) // loops :])


@pytest.mark.parametrize("name", [*REPEATED, *CONV])
@pytest.mark.parametrize("form", [ScaledLoop(lam=0.7, loops=3), ScaledLoop(loops=2, learnable=True)], ids=str)
def test_a_repeated_stream_is_the_unrolled_one(name: str, form: ScaledLoop) -> None:
    model, graph_module, inputs = looped(name, form)
    perturb(graph_module)
    assert form.loops is not None
    own = dict(graph_module.named_parameters())
    written = unrolled(model, form.loops)
    expected = last_repeat(reference(form, written, lambda o, n: own.get(f"residual.0.{o}.{n}"), *inputs), form.loops)
    actual = graph_module(*inputs)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert relative(a, e) < 1e-12
    grads = gradients(own, sum((o * torch.linspace(-1, 1, o.numel()).reshape(o.shape)).sum() for o in actual))
    theirs = {**dict(model.named_parameters()), **{n: p for n, p in own.items() if n.startswith("residual.")}}
    loss = sum((o * torch.linspace(-1, 1, o.numel()).reshape(o.shape)).sum() for o in expected)
    for parameter, grad in gradients(theirs, loss).items():
        if parameter in grads:
            assert relative(grads[parameter], grad) < 1e-9, parameter


def test_the_body_is_held_once_and_called_k_times() -> None:
    _, graph_module, inputs = looped("pre", ScaledLoop(loops=4))
    repeat, calls = repeat_in(graph_module), []
    repeat.body.register_forward_hook(lambda *_: calls.append(1))
    graph_module(*inputs)
    assert len(calls) == 4
    assert not list(repeat.parameters())
    assert not list(repeat.buffers())
    assert "loops=4" in repr(repeat)
    assert not [node for node in graph_module.graph.nodes if "mm" in str(node.target) or "linear" in str(node.target)]


def test_one_loop_is_the_plain_form_bit_for_bit() -> None:
    _, repeated, inputs = looped("taps", ScaledLoop(loops=1))
    _, plain, _ = looped("taps", ScaledLoop())
    assert repeat_in(repeated).count == 1
    assert all(torch.equal(a, b) for a, b in zip(repeated(*inputs), plain(*inputs), strict=True))


@pytest.mark.parametrize("name", ["pre", "post", "tied", "taps"])
def test_warm_start_is_the_plain_model_run_k_times(name: str) -> None:
    model, graph_module, inputs = looped(name, ScaledLoop(loops=3), warm_start=True)
    expected = last_repeat(unrolled(model, 3)(*inputs), 3)
    for a, e in zip(graph_module(*inputs), expected, strict=True):
        assert relative(a, e) < 1e-13


def test_who_reads_the_entry_reads_what_came_in() -> None:
    """The entry lies outside of the body: a tap there sees the stream's start, not that of a repeat."""
    _, inputs, _ = build("taps")
    model = EventModel(MODELS["taps"]).double()
    graph_module = capture(model, *inputs)
    assert apply(graph_module, stream_of(graph_module), ScaledLoop(loops=3))
    assert torch.equal(graph_module(*inputs)[1], inputs[0].sin())


def test_another_count_is_another_function() -> None:
    """The comparison above is no accident: each of 2, 3 and 4 repeats gives other numbers."""
    _, graph_module, inputs = looped("pre", ScaledLoop(loops=3))
    three = graph_module(*inputs)[0]
    for count in (2, 4):
        repeat_in(graph_module).count = count
        assert relative(graph_module(*inputs)[0], three) > 1e-4


class Wide(nn.Module):
    """A stream that ends in another shape than it starts in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.a(x))
        x = x.reshape(-1, 8)
        return x + torch.tanh(self.b(x))


def test_unequal_ends_are_refused_before_any_edit() -> None:
    graph_module = capture(Wide(), torch.randn(2, 3, 8))
    before = graph_module.code
    refusal = apply(graph_module, search(graph_module).streams[0], ScaledLoop(loops=2))
    assert not refusal
    assert "loops=2: it starts as float32" in str(refusal)
    assert "the same at both ends" in str(refusal)
    assert graph_module.code == before
    assert apply(graph_module, search(graph_module).streams[0], ScaledLoop())


class Dual(nn.Module):
    """Two streams, each branch reading both."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for k in (0, 2):
            both = torch.cat([x, y], -1)
            x, y = x + torch.tanh(self.f[k](both)), y + torch.tanh(self.f[k + 1](both))
        return x * y


def test_streams_that_run_through_each_other_are_refused() -> None:
    graph_module = capture(Dual(), torch.randn(2, 3, 8), torch.randn(2, 3, 8))
    streams, before = search(graph_module).streams, graph_module.code
    assert len(streams) == 2
    for results in (
        apply_all(graph_module, [Plan(stream, ScaledLoop(loops=2)) for stream in streams]),
        apply_all(graph_module, [Plan(streams[0], ScaledLoop(loops=2))], streams=streams),
    ):
        assert all("runs through it" in str(refusal) for refusal in results)
        assert graph_module.code == before


@pytest.mark.parametrize("loops", [0, -1, 1.5, True])
def test_loops_are_a_whole_number(loops: object) -> None:
    with pytest.raises(FormError, match="loops"):
        ScaledLoop(loops=loops)


def test_the_text_of_the_form_names_its_loops() -> None:
    form = ScaledLoop(lam=0.5, loops=3)
    assert form.to_spec() == "scaled_loop(lam=0.5, loops=3)"
    assert from_spec(form.to_spec()) == form
    assert from_spec("scaled_loop(loops=none)") == ScaledLoop()


# Growth: one tied branch, whose updates all point the same way where the state hardly turns.


class Normed(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.ln, self.w = nn.LayerNorm(d, elementwise_affine=False), nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w(self.ln(x))


def growing() -> tuple[GraphModule, Tensor, float]:
    """A model in which e = lam / N, its input, and the largest update that its branch can make."""
    torch.manual_seed(0)
    x = torch.randn(4, 16, dtype=torch.float64)
    model = Normed().double()
    graph_module = capture(model, x)
    assert apply(graph_module, stream_of(graph_module), ScaledLoop(loops=1, learnable=True))
    largest = 4 * float(torch.linalg.matrix_norm(model.w.weight.detach(), 2))  # a normed row has length sqrt(16)
    return graph_module, x, largest


GROWING = growing()


def growth(loops: int, lam: float) -> float:
    graph_module, x, _ = GROWING
    repeat_in(graph_module).count = loops
    with torch.no_grad():
        graph_module.get_parameter("residual.0.0.lam").fill_(lam)
        return float((graph_module(x) - x).norm(dim=-1).max())


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 64))
def test_1_over_n_is_bounded(loops: int) -> None:
    assert growth(loops, 1.0) <= GROWING[2] * (1 + 1e-9)


def test_1_over_sqrt_n_is_not() -> None:
    sizes = [growth(loops, math.sqrt(loops)) for loops in (1, 4, 16, 64)]
    assert all(b > 1.5 * a for a, b in pairwise(sizes)), sizes
    assert sizes[-1] > GROWING[2], (sizes, GROWING[2])


# Tied parameters of the other forms.


@functools.cache
def tied_toy() -> tuple[GraphModule, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    return capture(Toy(layers=2, loops=3, d=8).double(), x), x


@pytest.mark.parametrize("form", TIED, ids=lambda form: form.to_spec())
def test_gradients_of_tied_parameters_sum_over_executions(form: Form) -> None:
    graph_module, x = tied_toy()
    tied, untied = copy.deepcopy(graph_module), copy.deepcopy(graph_module)
    assert apply(tied, stream_of(tied), form)
    assert apply(untied, stream_of(untied), dataclasses.replace(form, tied=False))
    perturb(tied)
    new = {name: p for name, p in tied.named_parameters() if name.startswith("residual.")}
    assert {name.split(".")[2] for name in new} <= {"0", "1", "final"}
    groups = _copied_to_executions(new, untied)
    a, b = tied(x), untied(x)
    assert relative(a, b) < 1e-12
    cotangent = torch.randn_like(a)
    (a * cotangent).sum().backward()
    (b * cotangent).sum().backward()
    for name, parameter in new.items():
        assert len(groups[name]) > (0 if ".final." in name else 1), name
        assert relative(parameter.grad, sum(p.grad for p in groups[name])) < 1e-10, name


def _copied_to_executions(new: dict[str, Tensor], untied: GraphModule) -> dict[str, list[Tensor]]:
    """Give every execution its branch's values; returns the executions' parameters by tied name."""
    groups: dict[str, list[Tensor]] = {name: [] for name in new}
    for name, parameter in untied.named_parameters():
        if not name.startswith("residual."):
            continue
        _, stream, owner, leaf = name.split(".")
        branch = owner if owner == "final" else str(int(owner) % 2)
        groups[f"residual.{stream}.{branch}.{leaf}"].append(parameter)
        with torch.no_grad():
            parameter.copy_(new[f"residual.{stream}.{branch}.{leaf}"])
    return groups


def test_the_models_exist() -> None:
    assert set(REPEATED) <= set(MODELS)
