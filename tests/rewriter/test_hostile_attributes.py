"""The user's modules are left as they were, their plain attributes included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import resfx

X = torch.randn(2, 5, 8)


class Attributes(nn.Module):
    def __init__(self, attributes: dict[str, Any]) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.f(x)


@pytest.mark.parametrize("job", ["find", "rewrite"])
def test_lists_and_dicts_stay_the_same_objects(job: str) -> None:
    attributes: dict[str, Any] = {"aux": [], "options": {"a": [1]}, "pair": (1, [2])}
    inner = Attributes(attributes)
    model = nn.Sequential(inner)
    names = [set(vars(module)) for module in model.modules()]
    if job == "find":
        assert len(resfx.find(model, (X,)).sites) == 1
    else:
        resfx.rewrite(model, resfx.Standard(), (X,), copy=False)
    for name, value in attributes.items():
        assert getattr(inner, name) is value
    assert [set(vars(module)) for module in model.modules()] == names
