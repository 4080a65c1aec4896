"""Models whose own forward can't be traced: the parts that trace are found and rewritten, the rest stays the user's."""

from __future__ import annotations

import copy

import pytest
import torch
from new_parameters import new_parameters, perturb
from torch import Tensor, nn

import resfx

D = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.f, self.drop = nn.LayerNorm(D), nn.Linear(D, D), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.f(self.norm(x)).relu())


class Head(nn.Module):
    """Keeps the rows that score well: their number depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = x[self.score(x)[..., 0] > 0]
        return kept if kept.shape[0] > 1 else x[0]


class Detector(nn.Module):
    """Two parts with a stream, one without; the rows between them and behind them are chosen by their values."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.twice = twice
        self.stem, self.body = nn.Linear(D, D), nn.Sequential(Block(), Block())
        self.head, self.refine = Head(), nn.ModuleDict({"blocks": nn.Sequential(Block(), Block(), Block())})
        self.body.note = "read by the code around it"

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.body(self.stem(x))
        if x.abs().max().item() < 0:
            x = -x
        if self.twice:
            x = self.body(x[0]) + x
        kept = self.head(x)
        return {self.body.note: self.refine["blocks"](kept)}


def example() -> tuple[Detector, Tensor]:
    torch.manual_seed(0)
    return Detector(), torch.randn(3, 5, D)


def same(a: nn.Module, b: nn.Module, x: Tensor) -> bool:
    results = []
    for module in (a, b):
        torch.manual_seed(1)
        results.append(module(x))
    return list(results[0]) == list(results[1]) and all(
        results[0][key].shape == results[1][key].shape and torch.allclose(results[0][key], results[1][key], atol=1e-6)
        for key in results[0]
    )


def test_found_by_parts() -> None:
    model, x = example()
    found = resfx.find(model, (x,))
    assert [site.path for site in found.sites] == ["body.0", "body.1"] + [f"refine.blocks.{i}" for i in range(3)]
    assert [stream.index for stream in found.streams] == [0, 1]
    assert "`body`, `refine.blocks`" in found.notes[0]
    assert "Detector can't be traced as a whole" in found.notes[0]
    assert "site 1 of stream 0" in found.explain("body.1")
    assert "site 2 of stream 1" in found.explain("refine.blocks.2")
    assert "body" in str(found)


@pytest.mark.parametrize("form", [resfx.DeltaAttention(), resfx.MultiGate(), resfx.Review()])
def test_rewritten_by_parts(form: resfx.Form) -> None:
    model, x = example()
    before = copy.deepcopy(model)
    result = resfx.rewrite(model, form, (x,), warm_start=True)
    assert type(result) is Detector
    for mode in (True, False):
        for value in (x, torch.randn(4, 6, D)):
            assert same(result.train(mode), model.train(mode), value)
    names = set(result.state_dict())
    assert {name for name in names if not name.startswith("residual.")} == set(model.state_dict())
    new = new_parameters(result)
    assert {name.split(".")[1] for name in new} == {"0", "1"}
    assert set(new) == set(result.residual_map.parameters)
    assert set(result.residual_map.forms) == {0, 1}
    assert [site.path for site in result.residual_map.sites][-1] == "refine.blocks.2"
    result.eval()
    perturb(result)
    assert not same(result, model.eval(), x)
    other = copy.deepcopy(result)
    assert same(other, result, x)
    other(x)["read by the code around it"].square().sum().backward()
    assert all(parameter.grad is not None for parameter in new_parameters(other).values())
    again = resfx.rewrite(before, form, (x,), warm_start=True)
    again.load_state_dict(result.state_dict())
    assert same(again.eval(), result, x)


def test_the_model_stays_as_it_was_and_lends_its_modules() -> None:
    model, x = example()
    model.eval()
    before = model(x)
    result = resfx.rewrite(model, resfx.DeltaAttention(), (x,), copy=False)
    assert type(model.body) is nn.Sequential
    assert not hasattr(model, "residual")
    assert result.get_parameter("body.0.f.weight") is model.body[0].f.weight
    assert result.head is model.head
    assert all(torch.equal(a, b) for a, b in zip(model(x).values(), before.values(), strict=True))


def test_chosen_streams() -> None:
    model, x = example()
    by_path = resfx.rewrite(model, resfx.Review(), (x,), select="refine.blocks.1", warm_start=True)
    by_number = resfx.rewrite(model, resfx.Review(), (x,), streams=1, warm_start=True)
    for result in (by_path, by_number):
        assert {name.split(".")[1] for name in new_parameters(result)} == {"1"}
        assert same(result.eval(), model.eval(), x)
    assert len(new_parameters(by_path)) < len(new_parameters(by_number))
    with pytest.raises(resfx.NoResidualFound, match="matches no site"):
        resfx.rewrite(model, resfx.Review(), (x,), select="head.*")
    with pytest.raises(resfx.SelectionError):
        resfx.rewrite(model, resfx.Review(), (x,), streams=2)


def test_a_part_takes_every_call_that_the_model_makes() -> None:
    """`body` is called with three axes and with two, which no one graph takes: its blocks neither."""
    torch.manual_seed(0)
    model, x = Detector(twice=True), torch.randn(3, 5, D)
    found = resfx.find(model, (x,))
    assert {site.path for site in found.sites} == {f"refine.blocks.{i}" for i in range(3)}
    assert same(resfx.rewrite(model, resfx.Review(), (x,), warm_start=True).eval(), model.eval(), x)


def test_what_only_a_captured_model_has() -> None:
    model, x = example()
    result = resfx.rewrite(model, resfx.DeltaAttention(), (x,))
    with pytest.raises(resfx.NotRewritten, match="part by part"):
        resfx.revert(result)
    with pytest.raises(resfx.RewriteError, match="part by part"):
        resfx.rewrite(result, resfx.Review(), (x,))


class Base(nn.Module):
    def width(self) -> int:
        raise NotImplementedError


class Tower(Base):
    """Asked for more than its call by the code around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(7, D), Block()
        self.forward = self.forward  # as those do who wrap it

    @property
    def depth(self) -> int:
        return len(self._modules)

    def width(self) -> int:
        return self.embed.embedding_dim

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = Tower()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        assert isinstance(self.tower, Base)
        x = self.tower(self.tower.embedded(tokens) * self.tower.depth * self.tower.width())
        return {"out": x if x.sum() > -1e9 else -x}


def test_a_part_answers_what_its_class_does() -> None:
    torch.manual_seed(0)
    model, tokens = Around(), torch.randint(7, (3, 5))
    result = resfx.rewrite(model, resfx.DeltaAttention(), (tokens,), warm_start=True, copy=False).eval()
    assert same(result, model, tokens)
    perturb(result)
    assert not same(result, model, tokens)
    other = copy.deepcopy(result)
    assert same(other, result, tokens)
    assert set(other.state_dict()) == set(result.state_dict()) > set(model.state_dict())


def test_no_part_with_a_stream() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(D, D)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.f(x) if x.sum() > 0 else x

    with pytest.raises(resfx.CaptureError, match="Python control flow"):
        resfx.find(Bare(), (torch.randn(2, D),))


class Masked(nn.Module):
    """Traces only where the sizes of its two inputs are one and the same."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if mask.shape[1] != x.shape[1]:
            raise ValueError(f"the mask has {mask.shape[1]} rows for {x.shape[1]}")
        x = x + self.f(x) * mask
        return x + self.g(x) * mask


class Mixed(nn.Module):
    """A list of different layers, the first of which can't be traced, between decisions on values."""

    def __init__(self) -> None:
        super().__init__()
        self.masked, self.layers, self.last = (
            Masked(),
            nn.ModuleList([Head(), Block(), Block(), Head()]),
            nn.Linear(D, D),
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.masked(x, torch.ones(x.shape[0], x.shape[1], 1))
        for layer in self.layers:
            x = layer(x) if x.sum() > -1e9 else -x
        return {"out": self.last(x)}


@pytest.mark.parametrize("form", [resfx.DeltaAttention(), resfx.MultiGate()])
def test_every_part_that_traces_by_itself_is_taken(form: resfx.Form) -> None:
    """What stopped the whole does not stop a part; a layer is not like the one before it; one site may need no parameter."""
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(3, 5, D)
    wanted = ["masked", "masked", "layers.1", "layers.2"]
    assert [site.path for site in resfx.find(model, (x,)).sites] == wanted
    result = resfx.rewrite(model, form, (x,), warm_start=True)
    assert [site.path for site in result.residual_map.sites] == wanted
    assert result.residual_map.refused == {}
    assert same(result.eval(), model.eval(), x)
    perturb(result)
    assert not same(result, model, x)
