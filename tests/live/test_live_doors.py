"""Models that run their layers by another way than the forward of the module that holds them: rewritten, or an error by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import live_toys
import pytest
import torch
from live_helpers import assert_close, perturb, worst
from torch import Tensor, nn

import resfx

FORM = resfx.DeltaAttention()


class Layer(nn.Module):
    """Its methods call it by another name than `self`."""

    def __init__(this) -> None:
        super().__init__()
        this.norm, this.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(this, x: Tensor) -> Tensor:
        return x + this.linear(this.norm(x))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Layer() for _ in range(3)), nn.LayerNorm(8)
        self.seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.norm(x)
        return result

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            self.seen = x.norm().item()  # BREAK by a logged value
        return x


class Reaching(nn.Module):
    """Runs the layers of its backbone itself."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.logs = Backbone(), False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.backbone.layers:
            x = layer(x)
            if self.logs:
                print(end="")  # BREAK by a print
        result: Tensor = self.backbone.norm(x)
        return result


class Featured(nn.Module):
    """Calls another method of its backbone than `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone.features(x)


class OwnCall(Backbone):
    """Its calls never come to `forward`."""

    def __call__(self, x: Tensor) -> Tensor:
        return Backbone.forward(self, x)


class Counting(Backbone):
    """Its calls come to `forward`, by way of its own `__call__`."""

    def __call__(self, *args: Any) -> Any:
        self.seen += 1
        return super().__call__(*args)


class Siamese(Backbone):
    """Runs its stack twice, with a print between."""

    def forward(self, x: Tensor) -> Tensor:
        first = super().forward(x)
        print(end="")
        return first + super().forward(x * 2)


class Aliased(Backbone):
    """Its layers are registered under two names, and run by the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.alias = self.layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.alias:
            x = layer(x)
        return super().forward(x)


def attached(model: nn.Module) -> nn.Module:
    torch._dynamo.reset()
    resfx.attach(model, FORM, (live_toys.inputs(),), backend="eager")
    perturb(model)
    return model


def same_as_rewritten(model: nn.Module) -> None:
    x = live_toys.inputs()
    static, plain = resfx.rewrite(model, FORM, (x,)), model(x)
    attached(model)
    static.load_state_dict(model.state_dict())
    assert_close([model(x)], [static(x)])
    assert worst([model(x)], [plain]) > 1e-3


def line_of(text: str) -> str:
    with open(__file__) as file:
        number = next(n for n, line in enumerate(file, 1) if line.rstrip().endswith(text))
    return f"test_live_doors.py:{number}"


def test_a_root_that_runs_the_layers_of_its_backbone() -> None:
    same_as_rewritten(Reaching().eval())


@pytest.mark.parametrize(("make", "line"), [(Reaching, "BREAK by a print"), (Featured, "BREAK by a logged value")])
def test_a_break_in_a_loop_over_the_layers_of_another_module(make: Callable[[], nn.Module], line: str) -> None:
    model = make().eval()
    model.logs = True  # type: ignore[assignment]
    attached(model)
    for _ in range(2):
        with pytest.raises(resfx.LiveError) as caught:
            model(live_toys.inputs())
        assert line_of(line) in str(caught.value)


def test_a_root_whose_calls_do_not_come_to_its_forward() -> None:
    model = OwnCall().eval()
    with pytest.raises(resfx.LiveError, match=r"OwnCall has a `__call__` of its own, which does not come to `forward`"):
        attached(model)
    assert not hasattr(model, "residual")
    assert "forward" not in vars(model)


def test_a_root_with_a_call_of_its_own_that_comes_to_its_forward() -> None:
    same_as_rewritten(Counting().eval())


def test_an_unflattened_program() -> None:
    """Its modules hold layers that the root calls itself."""
    program = torch.export.export(Backbone().eval(), (live_toys.inputs(),))
    same_as_rewritten(torch.export.unflatten(program))


def test_a_program_as_a_module() -> None:
    """Dynamo sees no modules and no lines in it: its streams are known by their Parameters."""
    same_as_rewritten(torch.export.export(Backbone().eval(), (live_toys.inputs(),)).module())


def test_blocks_that_are_compiled_one_by_one() -> None:
    model = Backbone().eval()
    for number, layer in enumerate(model.layers):
        model.layers[number] = torch.compile(layer, backend="eager")
    same_as_rewritten(model)


def test_a_stack_that_runs_twice_with_a_break_between() -> None:
    """The second run has the parameters of the second stream, at every call."""
    model = Siamese().eval()
    same_as_rewritten(model)
    static = resfx.rewrite(Siamese().eval(), FORM, (live_toys.inputs(),))
    static.load_state_dict(model.state_dict())
    for x in (live_toys.inputs(3, 4), live_toys.inputs()):
        assert_close([model(x)], [static(x)])


def test_layers_under_two_names() -> None:
    same_as_rewritten(Aliased().eval())
