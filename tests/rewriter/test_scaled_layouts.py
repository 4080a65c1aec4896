"""A scaled identity behind a transpose: `x.mT * d + f(x)` with one factor per channel (the D skip of a state-space layer)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import resfx


class Skip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(6, 6), nn.Linear(6, 6)
        self.d = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.g(x)
        y = x.transpose(1, 2) * self.d[None, :, None] + self.f(x).transpose(1, 2)
        return y.transpose(1, 2)


FORMS = (resfx.DeltaAttention(seeded=True), resfx.AttentionResidual(), resfx.MultiGate(streams=2), resfx.Review())


@pytest.mark.parametrize("form", [resfx.Standard(), *FORMS], ids=lambda form: form.name)
def test_factor_of_another_layout(form: resfx.Form) -> None:
    model, x = Skip().eval(), torch.randn(2, 5, 6)
    rewritten = resfx.rewrite(model, form, (x,), warm_start=form.name != "standard")
    other = torch.randn(3, 4, 6)
    assert torch.allclose(rewritten(other), model(other), atol=1e-5)
