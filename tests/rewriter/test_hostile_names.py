"""Names that the generated code or the rewritten class need themselves."""

from __future__ import annotations

import copy
from typing import Any

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


@pytest.mark.parametrize("key", ["0", "a-b", "a b", "1a", "a/b", "class", "None", "import"])
def test_keys_of_a_table(key: str) -> None:
    model = Keyed(key)
    assert torch.equal(resfx.rewrite(model, resfx.Standard(), (X,))(X), model(X))


@pytest.mark.parametrize("frontend", ["export", "fx"])
def test_a_python_keyword_as_key(frontend: str) -> None:
    model = Keyed("class")
    assert [site.path for site in resfx.find(model, (X,), frontend=frontend).sites] == [""]
    result = copy.deepcopy(resfx.rewrite(model, resfx.Review(), (X,), frontend=frontend, warm_start=True))
    wanted = model(X)
    torch.testing.assert_close(result(X), wanted)
    torch.testing.assert_close(torch.compile(result, fullgraph=True, backend="eager")(X), wanted)
    torch.testing.assert_close(torch.export.export(result, (X,)).module()(X), wanted)
    assert isinstance(result.get_submodule("table.class"), nn.Linear)
    assert resfx.revert(result).state_dict().keys() == model.state_dict().keys()


class Arguments(nn.Module):
    """Arguments named like what generated code uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(8, 8)

    def forward(self, torch: Any, device: Any = None, inf: Any = None, dtype: Any = None, _flat: Any = None) -> Any:
        y = torch + self.f(torch)
        z = y.new_zeros(y.shape[0], 1, 8, device="cpu").masked_fill(y[:, :1] > 100, float("inf"))
        return y + z + (0 if _flat is None else _flat)


@pytest.mark.parametrize("frontend", ["export", "fx"])
def test_names_of_arguments(frontend: str) -> None:
    model = Arguments()
    result = resfx.rewrite(model, resfx.DeltaAttention(), (X,), {"_flat": X}, warm_start=True, frontend=frontend)
    torch.testing.assert_close(result(X, _flat=X), model(X, _flat=X))
