"""Sums that take the state times a factor (`f(x) - x`, beta of addmm), and layouts that hide an axis."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from passes_reference import REFERENCES, Branch
from passes_toys import capture, perturb, relative, stream_of
from test_events import FORMS, build, gradients
from torch import Tensor, nn
from torch.fx import GraphModule

from resfx.passes import DeltaAttention, Plan, Standard, apply, apply_all
from resfx.passes.form import Form
from resfx.patterns import search


class Factors(nn.Module):
    """State factors -1, 0.5, 1 and -1: `f(x) - x`, addmm with beta, a plain sum, and `f(x) - x` again."""

    factors = (-1.0, 0.5, 1.0, -1.0)

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.sub = nn.ModuleList(Branch(d) for _ in range(4))
        self.w = nn.Parameter(torch.randn(d, d) / d**0.5)

    def update(self, site: int, x: Tensor) -> Tensor:
        return self.sub[1].ln(x) @ self.w if site == 1 else self.sub[site](x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sub[0](x) - x
        x = torch.addmm(x, self.sub[1].ln(x), self.w, beta=0.5)
        x = x + self.sub[2](x)
        return self.sub[3](x) - x


@functools.cache
def captured() -> tuple[Factors, GraphModule, Tensor]:
    torch.manual_seed(0)
    model, x = Factors().double(), torch.randn(6, 8, dtype=torch.float64)
    return model, capture(model, x), x


def rewritten(form: Form, warm_start: bool = False) -> tuple[Factors, GraphModule, Tensor]:
    model, graph_module, x = captured()
    graph_module = copy.deepcopy(graph_module)
    (stream,) = search(graph_module).streams
    assert [site.skip_scale for site in stream.sites] == list(Factors.factors)
    applied = apply(graph_module, stream, form, warm_start=warm_start)
    assert applied, applied
    return model, graph_module, x


def expected(form: Form, model: Factors, graph_module: GraphModule, x: Tensor) -> Tensor:
    own = dict(graph_module.named_parameters())
    ref = REFERENCES[form.name](form, lambda o, n: own.get(f"residual.0.{o}.{n}"), x, list(range(4)), -1)
    for site, factor in enumerate(Factors.factors):
        update = model.update(site, ref.read(site))
        ref.scale(factor)
        ref.write(site, update)
    return ref.end("final")


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.to_spec())
def test_every_form_scales_what_it_keeps(form: Form) -> None:
    model, graph_module, x = rewritten(form)
    perturb(graph_module)
    actual, reference = graph_module(x), expected(form, model, graph_module, x)
    assert relative(actual, reference) < 1e-12
    own = dict(graph_module.named_parameters())
    theirs = {**dict(model.named_parameters()), **{n: p for n, p in own.items() if n.startswith("residual.")}}
    grads = gradients(own, (actual * torch.linspace(-1, 1, 48).reshape(6, 8)).sum())
    for name, grad in gradients(theirs, (reference * torch.linspace(-1, 1, 48).reshape(6, 8)).sum()).items():
        if name in grads:
            assert relative(grads[name], grad) < 1e-9, name


def test_standard_leaves_the_sums_alone() -> None:
    model, graph_module, x = rewritten(Standard())
    assert graph_module.code == captured()[1].code
    assert torch.equal(graph_module(x), model(x))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.to_spec())
def test_warm_starts_are_the_plain_model(form: Form) -> None:
    model, graph_module, x = rewritten(form, warm_start=True)
    assert relative(graph_module(x), model(x)) < 1e-14


def test_a_scaled_slice_is_refused() -> None:
    """A factor of a part alone is no factor of the state."""
    model, inputs, _ = build("slice")
    graph_module = capture(model, *inputs)
    stream, before = stream_of(graph_module), graph_module.code
    stream.sites[1].skip_scale = -1.0
    refusal = apply(graph_module, stream, DeltaAttention())
    assert "scales a slice of the state" in str(refusal)
    assert graph_module.code == before


class Mapped(nn.Module):
    """The second block sees one sample at a time: vmap hides an axis of the state in between."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.f(x))
        return torch.func.vmap(lambda sample: sample + torch.tanh(self.g(sample)))(x)


@functools.cache
def mapped() -> GraphModule:
    return capture(Mapped(), torch.randn(2, 5, 8))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.to_spec())
def test_a_stream_inside_vmap_is_refused_before_any_edit(form: Form) -> None:
    graph_module = mapped()
    streams, before = search(graph_module).streams, graph_module.code
    results = apply_all(graph_module, [Plan(stream, form) for stream in streams])
    assert any("changes how many numbers" in str(refusal) for refusal in results if not refusal)
    assert graph_module.code == before
