"""A saved program of a rewritten model says that it is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import resfx


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.wider = nn.Linear(8, 6)
        self.last = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.first:
            x = x + layer(x)
        x = self.wider(x)
        for layer in self.last:
            x = x + layer(x)
        return x


X = torch.randn(3, 8)


def saved(model: nn.Module, folder: Path) -> GraphModule:
    torch.export.save(torch.export.export(model, (X,)), folder / "m.pt2")
    module: Any = torch.export.load(folder / "m.pt2").module(check_guards=False)
    return GraphModule(module, module.graph)


@pytest.mark.parametrize("form", [resfx.DeltaAttention(), resfx.ScaledLoop(), resfx.MultiGate()])
def test_a_program_of_a_rewritten_model(form: resfx.Form, tmp_path: Path) -> None:
    model = saved(resfx.rewrite(Net().eval(), form, (X,), streams=[1]), tmp_path)
    found = resfx.find(model, (X,))
    assert f"rewritten already: stream 1 to {form.name}" in found.notes
    assert 0 not in found.forms
    with pytest.raises(
        resfx.RewriteError, match=f"was rewritten already: stream 1 to {form.name}; rewrite the model it was made from"
    ):
        resfx.rewrite(model, resfx.Review(), (X,))


def test_the_table_names_the_form(tmp_path: Path) -> None:
    found = resfx.find(saved(resfx.rewrite(Net().eval(), resfx.ScaledLoop(), (X,), streams=[1]), tmp_path), (X,))
    assert found.forms == {1: "scaled_loop"}
    assert "scaled_loop" in str(found).split("note:")[0]


def test_a_plain_program_and_a_live_model_are_none(tmp_path: Path) -> None:
    model = saved(Net().eval(), tmp_path)
    assert resfx.find(model, (X,)).notes == resfx.find(Net().eval(), (X,)).notes
    resfx.rewrite(model, resfx.Review(), (X,))
    twice = resfx.rewrite(resfx.rewrite(Net(), resfx.Review(), (X,), streams=[0]), resfx.Review(), (X,), streams=[1])
    assert twice.residual_map.forms == {0: "review", 1: "review"}
