"""Names that the generated code or the rewritten class need themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import resfx

X = torch.randn(2, 5, 8)


class Named(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.f, self.name = nn.Linear(8, 8), name
        self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.f(x)
        return x + self.get_submodule(self.name)(x)


class NamedParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)
        self.code = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.f(x) * self.code


@pytest.mark.parametrize("frontend", ["export", "fx"])
@pytest.mark.parametrize("name", ["graph", "code", "meta", "recompile", "print_readable", "residual_map", "generate"])
def test_names_of_the_rewritten_class(name: str, frontend: str) -> None:
    model = Named(name)
    found = resfx.find(model, (X,), frontend=frontend)
    assert [site.path for site in found.sites] == ["", ""]
    with pytest.raises(resfx.RewriteError, match=f"`{name}`"):
        resfx.rewrite(model, resfx.Standard(), (X,), frontend=frontend)


def test_name_of_a_parameter() -> None:
    model = NamedParameter()
    assert len(resfx.find(model, (X,)).sites) == 1
    with pytest.raises(resfx.RewriteError, match="`code`"):
        resfx.rewrite(model, resfx.Standard(), (X,))


class Keyed(nn.Module):
    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.table = key, nn.ModuleDict({key: nn.Linear(8, 8)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[self.key](x)


@pytest.mark.parametrize("frontend", ["export", "fx"])
@pytest.mark.parametrize("key", ["class", "None"])
def test_a_python_keyword_as_key_is_named(key: str, frontend: str) -> None:
    with pytest.raises(resfx.CaptureError, match=rf"`table\.{key}"):
        resfx.find(Keyed(key), (X,), frontend=frontend)


@pytest.mark.parametrize("key", ["0", "a-b", "a b", "1a", "a/b"])
def test_other_keys_work(key: str) -> None:
    model = Keyed(key)
    assert torch.equal(resfx.rewrite(model, resfx.Standard(), (X,))(X), model(X))
