"""The calling convention: the user's own signature, and one check at entry."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from capture_helpers import fold_model
from torch import nn

from resfx.capture import CaptureError, DynamicDimSpecialized, GuardError, NotAModule, capture


@dataclass
class Result:
    hidden: torch.Tensor
    extra: dict[str, torch.Tensor]


torch.export.register_dataclass(Result, serialized_type_name="resfx.tests.Result")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(
        self, x: torch.Tensor, /, mask: torch.Tensor | None = None, *more: torch.Tensor, gain: float = 1.0, **named: Any
    ) -> Result:
        y = x + self.f(x) * gain * self.scale
        if mask is not None:
            y = y * mask
        for other in more:
            y = y + other
        for pair in named.get("pairs", ()):
            y = y + pair["left"]
        return Result(y, {"mean": y.mean(-1)})


X, M, P = torch.randn(2, 5, 8), torch.ones(2, 5, 1), [{"left": torch.randn(8)}]


def test_signature_and_output_type() -> None:
    model = Net()
    graphed, _ = fold_model(model, (X, M, X), {"gain": 2.0, "pairs": P})
    wanted = inspect.signature(model.forward).parameters.values()
    got = inspect.signature(graphed.forward).parameters.values()
    assert [(p.name, p.kind, p.default) for p in got] == [(p.name, p.kind, p.default) for p in wanted]
    expected, result = model(X, M, X, gain=2.0, pairs=P), graphed(X, M, X, pairs=P, gain=2.0)
    assert type(result) is Result
    assert torch.equal(expected.hidden, result.hidden)
    assert torch.equal(expected.extra["mean"], result.extra["mean"])
    assert "unused.weight" in copy.deepcopy(graphed).state_dict()
    assert "scale" not in graphed.state_dict()


def test_changes_of_a_constant_are_named() -> None:
    graphed, _ = fold_model(Net(), (X,))
    with pytest.raises(GuardError, match="`mask`"):
        graphed(X, M)
    with pytest.raises(GuardError, match="`gain`"):
        graphed(X, gain=3.0)
    with pytest.raises(GuardError, match="pairs"):
        graphed(X, pairs=P)
    with pytest.raises(GuardError, match="dimensions"):
        graphed(X[0])
    with pytest.raises(GuardError, match=r"torch\.float64"):
        graphed(X.double())
    with pytest.raises(GuardError, match="axis 2"):
        graphed(torch.randn(2, 5, 7))


class Sizes(nn.Module):
    """Assumes things about its sizes, in three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x + self.f(x)
        if x.shape[1] > 9:
            return x.sin()
        if x.shape[1] % 2 == 0:
            x = x * 2
        return x + y


def test_guards_on_sizes() -> None:
    graphed, folded = fold_model(Sizes(), (torch.randn(3, 4, 8), torch.randn(3, 4, 8)))
    model = Sizes()
    model.load_state_dict(graphed.state_dict())
    for batch, length in ((3, 4), (5, 6), (1, 8)):
        x, y = torch.randn(batch, length, 8), torch.randn(batch, length, 8)
        assert torch.equal(graphed.eval()(x, y), model(x, y))
    with pytest.raises(GuardError, match="axis 1"):
        graphed(torch.randn(3, 12, 8), torch.randn(3, 12, 8))
    with pytest.raises(GuardError, match="axis 1"):
        graphed(torch.randn(3, 5, 8), torch.randn(3, 5, 8))
    with pytest.raises(GuardError, match=r"`y`, axis 0: size 2, but x\.shape\[0\] is 3"):
        graphed(torch.randn(3, 4, 8), torch.randn(2, 4, 8))
    assert ("x", 2) in folded.captured.fixed_dims
    assert ("x", 1) in folded.captured.open_dims


def test_equal_example_sizes_stay_independent() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sin(), y.cos()

    captured = capture(Two(), (torch.randn(4, 4), torch.randn(4, 4)))
    a, b = captured.graph_module(torch.randn(2, 3), torch.randn(5, 6))
    assert (a.shape, b.shape) == ((2, 3), (5, 6))


def test_asked_dimension_that_is_fixed_is_named() -> None:
    dim = torch.export.Dim("features")
    for wish in (dim, torch.export.Dim.DYNAMIC):
        with pytest.raises(DynamicDimSpecialized, match=r"`x`, axis 2"):
            capture(Net(), (X,), dynamic_shapes={"x": {0: torch.export.Dim("batch"), 2: wish}})
    captured = capture(Net(), (X,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    assert ("x", 0) in captured.open_dims


def test_not_a_module() -> None:
    with pytest.raises(NotAModule, match="the class `Net`"):
        capture(Net, (X,))
    with pytest.raises(NotAModule, match="a function"):
        capture(lambda x: x, (X,))


class Box:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Box]:
        return x + self.f(x), Box(x)


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Boxed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.f(x) @ torch.ones(3, 3)


def test_unknown_container_and_broken_forward() -> None:
    with pytest.raises(CaptureError, match="register_dataclass"):
        capture(Boxed(), (X,))
    with pytest.raises(CaptureError, match=r"test_calling\.py:\d+: return self\.inner\.f"):
        capture(Broken(), (X,))
    with pytest.raises(CaptureError, match="args and kwargs"):
        capture(Net(), (), {"nothing": X})
    model = Broken().train()
    with pytest.raises(CaptureError):
        capture(model, (X,))
    assert all(module.training for module in model.modules())


def test_compile_export_and_second_call_by_keyword() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
            return x + self.f(x) * first - second

    model = Masked()
    args = (X, torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    graphed, _ = fold_model(model, args)
    compiled = torch.compile(graphed, fullgraph=True, backend="aot_eager", dynamic=True)
    other = tuple(torch.randn(4, 7, 8) for _ in range(3))
    assert torch.equal(compiled(*other), model(*other))
    # Keywords in another order: two tensors of one shape must not change places.
    program = torch.export.export(graphed, (X,), {"second": args[2], "first": args[1]}, strict=False)
    assert torch.equal(program.module()(X, second=args[2], first=args[1]), model(*args))
    add = next(node for node in program.graph.nodes if "aten.sub" in str(node.target))
    assert "test_calling.py" in add.meta["stack_trace"]
