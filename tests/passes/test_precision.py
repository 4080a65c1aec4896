"""Half precision and autocast: statistics in float32, no dtype changes, the deviation stays the plain model's."""

from __future__ import annotations

import pytest
import torch
from passes_toys import Toy, capture, perturb, relative, stream_of
from test_events import FORMS

from resfx.passes import apply, gating, ops, products, routing, statistics
from resfx.passes.form import Form


def perturbed(form: Form) -> tuple[torch.nn.Module, torch.Tensor, torch.fx.GraphModule]:
    """A float32 model, its input, and its rewritten capture away from the start."""
    torch.manual_seed(0)
    model, x = Toy(layers=5, d=16, head=True), torch.randn(3, 5, 16)
    wide = capture(model, x)
    if not apply(wide, stream_of(wide), form):
        pytest.skip("too shallow for competitive gates")
    perturb(wide, size=0.1)
    return model, x, wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.to_spec())
def test_half_precision(form: Form, dtype: torch.dtype) -> None:
    model, x, wide = perturbed(form)
    half = capture(model.to(dtype), x.to(dtype))
    dtypes = {node.name: node.meta["val"].dtype for node in half.graph.nodes if "linear" in node.name}
    apply(half, stream_of(half), form)
    half.load_state_dict(wide.state_dict())
    added = [node for node in half.graph.nodes if node.name in dtypes]
    assert len(added) == len(dtypes)
    for node in half.graph.nodes:
        if "resfx" in node.meta.get("custom", {}) and isinstance(node.meta["val"], torch.Tensor):
            assert node.meta["val"].dtype == dtype, node
    plain = relative(model.to(dtype)(x.to(dtype)).float(), model.float()(x))
    assert half(x.to(dtype)).dtype == dtype
    assert relative(half(x.to(dtype)).float(), wide(x)) < 3 * plain


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.to_spec())
def test_statistics_in_float32_are_enough(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 a half-precision model comes no closer to its float32 twin: what parts them are the values between the operations."""
    model, x, wide = perturbed(form)
    half, narrow = capture(model.bfloat16(), x.bfloat16()), x.bfloat16()
    apply(half, stream_of(half), form)
    half.load_state_dict(wide.state_dict())
    usual = relative(half(narrow).float(), wide(x))
    for module in (ops, gating, products, routing, statistics):
        if hasattr(module, "wide"):
            monkeypatch.setattr(module, "wide", torch.Tensor.double)
    assert usual == pytest.approx(relative(half(narrow).float(), wide(x)), rel=0.1)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.to_spec())
def test_autocast_keeps_the_dtypes(form: Form) -> None:
    """Under autocast the ops run at the precision of their inputs: each reads and returns what it would without."""
    torch.manual_seed(0)
    model, x = Toy(layers=5, d=16), torch.randn(3, 5, 16)
    graph_module = capture(model, x, dialect="fx")
    if not apply(graph_module, stream_of(graph_module), form):
        pytest.skip("too shallow for competitive gates")
    perturb(graph_module, size=0.1)
    seen: list[tuple[str, torch.dtype]] = []

    class Watch(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):  # type: ignore[no-untyped-def]
            value = super().call_function(target, args, kwargs)
            if getattr(target, "__module__", "") == ops.__name__ and isinstance(value, torch.Tensor):
                seen.append((target.__name__, value.dtype))
            return value

    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast = Watch(graph_module).run(x)
    assert all(dtype == torch.float32 for name, dtype in seen if name != "subtract")
    assert autocast.dtype == torch.float32
    assert relative(autocast, graph_module(x)) < 0.05


def test_gates_are_computed_wide() -> None:
    """A gate whose half-precision matmul would lose its bits: the float32 result is the right one."""
    torch.manual_seed(0)
    h, u, w = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64, 128)
    b = torch.zeros(64)
    halves = [t.bfloat16() for t in (h, u, w, b)]
    exact = ops.review_write(*[t.double() for t in halves], 1e-5, -1)
    assert relative(ops.review_write(*halves, 1e-5, -1).double(), exact) < 2**-8
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = ops.review_write(*[t.float() for t in halves], 1e-5, -1)
    assert relative(inside.double(), exact) < 1e-5


def test_cast_events_keep_the_state_wide() -> None:
    """A float32 stream with bfloat16 branches: reads keep the stream's dtype at every point."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sub = torch.nn.ModuleList(torch.nn.Linear(8, 8).bfloat16() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.to(torch.float32)
            for sub in self.sub:
                x = x + sub(x.to(torch.bfloat16))
            return x

    torch.manual_seed(0)
    model, x = Wide(), torch.randn(3, 8).bfloat16()
    for form in FORMS:
        graph_module = capture(model, x)
        if not apply(graph_module, stream_of(graph_module), form):
            continue
        perturb(graph_module)
        y = graph_module(x)
        assert y.dtype == torch.float32
        assert torch.isfinite(y).all()
        if form.to_spec() == "standard":
            assert torch.equal(y, model(x))
        elif form.at_init != "identical":
            assert not torch.allclose(y, model(x))
