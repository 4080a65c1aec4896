"""Modules that others generated: traced graphs, exported and unflattened programs, compiled ones; TorchScript is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from new_parameters import perturb
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import resfx

X = (torch.randn(3, 5, 8),)
OPEN = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.f, self.g, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.f(self.n(x)))
        return x + self.g(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.norm = Block(), Block(), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.second(self.first(x)))


def program(model: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(model.eval(), X, dynamic_shapes=OPEN)


def with_second(make: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = Net().eval()
    model.second = make(model.second)
    return model


ROOTS: dict[str, Callable[[], nn.Module]] = {
    "symbolic_trace": lambda: fx.symbolic_trace(Net().eval()),
    "make_fx": lambda: make_fx(Net().eval())(*X),
    "program": lambda: program(Net()).module(),
    "decomposed program": lambda: program(Net()).run_decompositions().module(),
    "unflattened program": lambda: torch.export.unflatten(program(Net())),
    "compiled": lambda: torch.compile(Net().eval(), backend="eager"),
    "compiled in place": lambda: _compiled_in_place(Net().eval()),
    "submodule traced": lambda: with_second(fx.symbolic_trace),
    "submodule exported": lambda: with_second(lambda block: program(block).module()),
    "submodule unflattened": lambda: with_second(lambda block: torch.export.unflatten(program(block))),
    "submodule compiled": lambda: with_second(lambda block: torch.compile(block, backend="eager")),
    "submodule compiled in place": lambda: with_second(_compiled_in_place),
}


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


@pytest.mark.parametrize("name", ROOTS)
def test_generated(name: str) -> None:
    model = ROOTS[name]()
    assert [len(stream.sites) for stream in resfx.find(model, X).streams] == [4]
    result = resfx.rewrite(model, resfx.DeltaAttention(), X, warm_start=True)
    assert torch.allclose(result(*X), model(*X), atol=1e-6)
    assert {n for n in result.state_dict() if not n.startswith("residual.")} == set(model.state_dict())
    other = torch.randn(2, 7, 8)
    if name != "make_fx":  # it holds the example's sizes
        assert torch.allclose(result(other), model(other), atol=1e-6)
    perturb(result)
    assert not torch.allclose(result(*X), model(*X), atol=1e-3)


@pytest.mark.parametrize("name", ["program", "submodule exported"])
def test_the_mode_of_the_result_can_be_set(name: str) -> None:
    result = resfx.rewrite(ROOTS[name](), resfx.MultiGate(), X)
    assert not result.eval().training
    assert torch.equal(copy.deepcopy(result).eval()(*X), result(*X))


def test_a_loaded_program(tmp_path: Path) -> None:
    torch.export.save(program(Net()), tmp_path / "net.pt2")
    model = torch.export.load(tmp_path / "net.pt2").module()
    assert len(resfx.find(model, X).sites) == 4
    result = resfx.rewrite(model, resfx.MultiGate(), X, warm_start=True)
    assert torch.allclose(result(*X), Net().eval()(*X), atol=1e-6)


@pytest.mark.parametrize("script", [torch.jit.script, lambda block: torch.jit.trace(block, X)], ids=["script", "trace"])
@pytest.mark.filterwarnings("ignore")
def test_a_scripted_submodule_is_refused(script: Callable[[nn.Module], nn.Module]) -> None:
    with pytest.raises(resfx.RewriteError, match=r"`second`.*TorchScript"):
        resfx.rewrite(with_second(script), resfx.DeltaAttention(), X)
    with pytest.raises(resfx.NotAModule, match="TorchScript"):
        resfx.find(script(Net().eval()), X)
