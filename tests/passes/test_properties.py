"""What the papers promise of a form, for weights and depths by chance; gradients against finite differences."""

from __future__ import annotations

import copy
import functools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from passes_reference import Branch, EventModel, Step
from passes_toys import Toy, capture, perturb, relative, stream_of
from test_events import FORMS as EVERY_FORM
from test_events import MODELS
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

from resfx.passes import AttentionResidual, DeltaAttention, Highway, MultiGate, Review, ScaledLoop, apply
from resfx.passes.form import Form
from resfx.patterns import search

D = 8
SEEDS = st.integers(0, 2**31)


@functools.cache
def deep(layers: int) -> tuple[GraphModule, Tensor]:
    """A pre-norm model with a norm at its end, and an input of several magnitudes."""
    torch.manual_seed(layers)
    model = Toy(layers=layers, d=D, head=True).double()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-16  # what stands between "scaled" and equal
    x = torch.randn(3, 4, D, dtype=torch.float64) * torch.tensor([0.1, 1.0, 10.0, 100.0]).reshape(1, 4, 1).double()
    return capture(model, x), x


def rewritten(layers: int, form: Form) -> tuple[GraphModule, Tensor]:
    graph_module, x = deep(layers)
    graph_module = copy.deepcopy(graph_module)
    assert apply(graph_module, stream_of(graph_module), form)
    return graph_module, x


class Watch(Interpreter):
    """Keeps the value of every node."""

    def __init__(self, graph_module: GraphModule) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.values: dict[Node, Tensor] = {}

    def run_node(self, n: Node) -> object:
        self.values[n] = super().run_node(n)
        return self.values[n]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.sampled_from(["independent", "competitive"]), SEEDS, st.floats(0.01, 10.0))
def test_multi_gate_never_exceeds_its_inputs(streams: int, gate: str, seed: int, size: float) -> None:
    """Every stream and every pool is a convex mix: no token of it is longer than the longest of h0 and the updates."""
    graph_module, x = rewritten(6, MultiGate(streams=streams, gate=gate))
    perturb(graph_module, seed, size)
    watch = Watch(graph_module)
    watch.run(x)
    mixes = [node for node, value in watch.values.items() if "_mix" in node.name and isinstance(value, list)]
    assert len(mixes) == 6 - streams + 1
    longest = x.norm(dim=-1)
    for node, value in watch.values.items():
        if node in mixes:
            inputs, results = [node.args[1]], value
        elif node.name.startswith("pool"):
            inputs, results = [source for source in node.args[0] if not source.name.startswith("pick")], [value]
        else:
            continue
        for entering in inputs:
            longest = torch.maximum(longest, watch.values[entering].norm(dim=-1))
        for result in results:
            assert bool((result.norm(dim=-1) <= longest * (1 + 1e-12)).all()), node


def test_the_plain_model_exceeds_them() -> None:
    """The bound is one of the form, not of the model."""
    graph_module, x = deep(6)
    watch = Watch(graph_module)
    watch.run(x)
    adds = [node for node in watch.values if node.name.startswith("add")]
    longest = torch.stack([x.norm(dim=-1), *(watch.values[node.args[1]].norm(dim=-1) for node in adds)]).amax(0)
    assert not bool((watch.values[adds[-1]].norm(dim=-1) <= longest).all())


# Forms that say "scaled" of themselves; the null vector is a source of length zero.
SCALED: list[Form] = [
    DeltaAttention(),
    DeltaAttention(tied=True, seeded=True),
    DeltaAttention(gate="scalar"),
    DeltaAttention(granularity="block", block_size=1),
    AttentionResidual(),
    AttentionResidual(granularity="block", block_size=2),
]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 7), st.sampled_from([DeltaAttention(), DeltaAttention(tied=True), AttentionResidual()]), SEEDS)
def test_zero_queries_are_the_plain_pre_norm_model(layers: int, form: Form, seed: int) -> None:
    """Whatever the key norms are: equal weights read a multiple of the state."""
    graph_module, x = rewritten(layers, form)
    perturb(graph_module, seed, 1.0)
    with torch.no_grad():
        for name, parameter in graph_module.named_parameters():
            if name.endswith(".query"):
                parameter.zero_()
    assert relative(graph_module(x), deep(layers)[0](x)) < 1e-12


def test_they_say_so() -> None:
    assert {form.at_init for form in SCALED} == {"scaled"}


@pytest.mark.parametrize(
    "form", [DeltaAttention(granularity="block", block_size=2), DeltaAttention(query_init_std=0.5)]
)
def test_a_form_that_says_different_is(form: Form) -> None:
    graph_module, x = rewritten(4, form)
    assert form.at_init == "different"
    assert relative(graph_module(x), deep(4)[0](x)) > 1e-3


# Between the sites: what scales the state, is added to it or lies on a slice of it.

EVENTS = ["pre", "scale", "side", "slice", "copies", "flip", "tied", "one"]


def events_model(name: str) -> tuple[EventModel, tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    model = EventModel(MODELS[name]).double()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-16
    x = torch.randn(3, 4, D, dtype=torch.float64)
    return model, (x, torch.randn_like(x))


def sources(steps: list[Step]) -> int:
    """h0 and the updates."""
    return 1 + sum(kind.endswith("site") or kind == "slice" for kind, *_ in steps)


@pytest.mark.parametrize("name", EVENTS)
def test_equal_weights_sum_to_the_plain_state(name: str) -> None:
    """AttentionResidual, full, at zero query: end() is the plain state over the number of sources, whatever happens between sites."""
    model, inputs = events_model(name)
    graph_module = capture(model, *inputs)
    assert apply(graph_module, stream_of(graph_module), AttentionResidual())
    assert relative(graph_module(*inputs)[0] * sources(model.steps), model(*inputs)[0]) < 1e-12


@pytest.mark.parametrize("name", EVENTS)
def test_equal_streams_pool_to_the_plain_state(name: str) -> None:
    """MultiGate, more streams than writes: the pool is the sum of h0 and the updates over their number.

    What is added on the side enters every stream, so it comes out of the pool whole.
    """
    model, inputs = events_model(name)
    steps: list[Step] = [step for step in model.steps if step[0] != "side"]
    plain = copy.copy(model)
    plain.steps = steps
    graph_module = capture(plain, *inputs)
    assert apply(graph_module, stream_of(graph_module), MultiGate(streams=sources(steps)))
    assert relative(graph_module(*inputs)[0] * sources(steps), plain(*inputs)[0]) < 1e-12


def test_a_side_add_moves_the_pool_by_itself() -> None:
    model, (x, c) = events_model("pre")
    for steps in ([*MODELS["pre"], ("side",)], [*MODELS["pre"], ("scale", 0.5), ("side",)]):
        model.steps = steps
        graph_module = capture(model, x, c)
        assert apply(graph_module, stream_of(graph_module), MultiGate(streams=2))
        perturb(graph_module)
        assert relative(graph_module(x, c)[0] - graph_module(x, torch.zeros_like(c))[0], c) < 1e-12


# Sums: their order and brackets are no part of the model.


class Sums(nn.Module):
    """Two updates by three branches each, added in an order and with brackets by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.ModuleList(Branch(D) for _ in range(3)) for _ in range(3))
        self.seed = 0

    def forward(self, x: Tensor) -> Tensor:
        rng = random.Random(self.seed)
        for branches in self.branches:
            terms = [x, *(branch(x) for branch in branches)]
            rng.shuffle(terms)
            while len(terms) > 1:
                i = rng.randrange(len(terms) - 1)
                terms[i : i + 2] = [terms[i] + terms[i + 1]]
            x = terms[0]
        return x


PERMUTED: list[Form] = [
    DeltaAttention(gate="vector"),
    DeltaAttention(granularity="block", block_size=2),
    AttentionResidual(),
    MultiGate(streams=2),
    Review(),
    Highway(),
    ScaledLoop(learnable=True),
]


@functools.cache
def summed(seed: int, form: Form) -> GraphModule:
    torch.manual_seed(0)
    model = Sums().double()
    model.seed = seed
    graph_module = capture(model, torch.randn(2, 3, D, dtype=torch.float64))
    (stream,) = search(graph_module).streams
    assert [len(site.branches) for site in stream.sites] == [3, 3, 3]
    assert apply(graph_module, stream, form)
    perturb(graph_module)
    return graph_module


@settings(max_examples=10, deadline=None)
@given(st.sampled_from(PERMUTED), st.integers(1, 10**6))
def test_the_order_of_a_sum_changes_nothing(form: Form, seed: int) -> None:
    x = torch.randn(2, 3, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    first, second = summed(0, form), summed(seed, form)
    assert {n: p.shape for n, p in first.named_parameters()} == {n: p.shape for n, p in second.named_parameters()}
    assert relative(second(x), first(x)) < 1e-12


# Gradients.


@pytest.mark.parametrize("form", [form for form in EVERY_FORM if form.name != "standard"], ids=lambda f: f.to_spec())
def test_gradients_are_those_of_finite_differences(form: Form) -> None:
    torch.manual_seed(0)
    model, x = Toy(layers=3, d=4).double(), torch.randn(2, 2, 4, dtype=torch.float64)
    graph_module = capture(model, x)
    if not apply(graph_module, stream_of(graph_module), form):
        graph_module = capture(model := Toy(layers=5, d=4).double(), x)
        assert apply(graph_module, stream_of(graph_module), form)
    perturb(graph_module)
    new = {n: p.detach().clone().requires_grad_() for n, p in graph_module.named_parameters() if "residual." in n}

    def function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(graph_module, dict(zip(new, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x.requires_grad_(), *new.values()))
