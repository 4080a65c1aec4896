"""Regions of autocast in the result: entered for real wherever it runs, and left where a line in them raises."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import resfx


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Autocast(nn.Module):
    """Casts inside of a region: what a program notes of their inputs must be what it finds there."""

    def __init__(self, nested: bool = False) -> None:
        super().__init__()
        self.nested = nested
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = x + block(x).to(x.dtype)
            if self.nested:
                with torch.autocast("cpu", enabled=False):
                    return x @ x.mT
        return x


FORMS = [resfx.Standard(), resfx.DeltaAttention(), resfx.MultiGate(streams=2), resfx.ScaledLoop(loops=2)]


@pytest.fixture(params=FORMS, ids=lambda form: form.name)
def rewritten(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Autocast().eval(), torch.randn(2, 5, 16)
    result = resfx.rewrite(model, request.param, (x,))
    for parameter in result.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return result, x


def test_an_exported_program_runs_as_the_result_does(rewritten: tuple[nn.Module, Tensor]) -> None:
    model, x = rewritten
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))


def test_a_copy_and_a_compiled_one_run_as_the_result_does(rewritten: tuple[nn.Module, Tensor]) -> None:
    model, x = rewritten
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))


def test_autocast_is_off_after_an_error(rewritten: tuple[nn.Module, Tensor]) -> None:
    model, x = rewritten

    def fails(*_: object) -> None:
        raise ValueError("in the middle")

    model.get_submodule("blocks.1").register_forward_hook(fails)
    with pytest.raises(ValueError, match="in the middle"):
        model(x)
    assert not torch.is_autocast_enabled("cpu")


def test_the_code_has_blocks() -> None:
    model, x = Autocast(nested=True).eval(), torch.randn(2, 5, 16)
    result = resfx.rewrite(model, resfx.DeltaAttention(), (x,))
    code = result.code
    assert torch.equal(torch.export.export(result, (x,)).module()(x), result(x))
    assert "        with torch.autocast('cpu', torch.bfloat16, False" in code
    assert "with torch.autocast('cpu', torch.bfloat16, True" in code
    assert "_enter_autocast" not in code
