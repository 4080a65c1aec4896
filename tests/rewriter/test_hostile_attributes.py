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


class HooksItself(nn.Module):
    """Registers a hook in its first call, to record a hidden state, and remembers its input."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.inputs: list[torch.Tensor] = []
        self.hidden: list[torch.Tensor] = []
        self.is_hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            self.f.register_forward_hook(lambda module, args, output: self.hidden.append(output))
            self.is_hooked = True
        self.inputs.append(x)
        self.hidden.clear()
        x = x + self.f(x)
        return x + self.head(sum(self.hidden))


@pytest.mark.parametrize("job", ["find", "rewrite"])
def test_what_the_first_call_sets_up_is_set_up_once(job: str) -> None:
    model, reference = HooksItself(), HooksItself()
    reference.load_state_dict(model.state_dict())
    if job == "find":
        assert len(resfx.find(model, (X,)).sites) == 1
    else:
        resfx.rewrite(model, resfx.Standard(), (X,), copy=False)
    assert all(type(value) is torch.Tensor for value in model.inputs)  # none of a trace
    assert torch.equal(model(X), reference(X))
    assert len(model.hidden) == 1
