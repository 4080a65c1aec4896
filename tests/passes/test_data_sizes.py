"""Streams of states whose size depends on the data."""

from __future__ import annotations

import pytest
import torch
from new_parameters import perturb
from torch import Tensor, nn

import resfx

D = 8


class Kept(nn.Module):
    """The rows that a mask keeps, laid out so that nobody can tell whether they lie in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(D, D, 1) for _ in range(3))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        z = x[keep].T[None]
        for layer in self.layers:
            z = z + layer(z).relu()
        return z


@pytest.mark.parametrize("form", [resfx.DeltaAttention(), resfx.MultiGate(), resfx.Review()])
def test_a_state_whose_size_depends_on_the_data(form: resfx.Form) -> None:
    torch.manual_seed(0)
    model, x, keep = Kept().eval(), torch.randn(6, D), torch.tensor([True, False, True, True, False, True])
    result = resfx.rewrite(model, form, (x, keep), warm_start=True)
    for rows in (keep, ~keep):
        assert torch.allclose(result(x, rows), model(x, rows), atol=1e-6)
    perturb(result)
    assert not torch.allclose(result(x, keep), model(x, keep), atol=1e-3)
