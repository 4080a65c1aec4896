"""What a user reads: explain, to_dict and print of the residual map."""

from __future__ import annotations

import json

import pytest
import torch
from patterns_marks import D
from torch import Tensor, nn

import resfx
from resfx.patterns import Rejected


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.map = nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.map(self.norm(x))


class Model(nn.Module):
    def __init__(self, depth: int = 2, turns: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.out, self.turns = nn.Linear(D, D), turns

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.turns):
            for block in self.blocks:
                x = block(x)
        y = self.out(x)
        return y + torch.sin(y)


def found(depth: int = 2, turns: int = 1) -> resfx.ResidualMap:
    return resfx.find(Model(depth, turns).eval(), (torch.randn(2, 5, D),))


@pytest.fixture(scope="module")
def residuals() -> resfx.ResidualMap:
    return found()


def test_explain_a_site(residuals: resfx.ResidualMap) -> None:
    site = residuals.sites[1]
    line = f"{site.source}: site 1 of stream 0 (plain, 1 branch)"
    assert residuals.explain("blocks.1") == line
    assert residuals.explain(site.node.name) == line
    assert len(residuals.explain(site.source).splitlines()) == 2  # the same line of code in both blocks
    assert residuals.explain("test_report.py:" + site.source.rsplit(":", 1)[1]) == residuals.explain(site.source)


def test_explain_a_refusal(residuals: resfx.ResidualMap) -> None:
    (miss,) = residuals.rejected
    assert not miss
    assert residuals.explain(miss.source) == f"{miss.source}: no site (learned): {miss.reason}"
    assert "meets no weight" in miss.reason


def test_explain_names_what_it_was_asked(residuals: resfx.ResidualMap) -> None:
    assert residuals.explain("blocks.1.map") == "no sum of two or more computed terms at 'blocks.1.map'"
    assert residuals.explain("blocks").startswith("no sum")
    assert residuals.explain("test_report.py:1").startswith("no sum")


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("blocks.7", r"Nearest: blocks.1, blocks.0"),
        ("map", r"Nearest: blocks.0.map, blocks.1.map"),
        ("tset_report.py:21", r"Nearest: test_report.py:\d+"),
        ("nothing at all", r"print\(model\)"),
    ],
)
def test_explain_a_place_that_is_not_there(residuals: resfx.ResidualMap, path: str, near: str) -> None:
    with pytest.raises(resfx.UnknownPlace, match=f"{path!r} is no module of the model.*{near}"):
        residuals.explain(path)


def test_explain_after_a_rewrite() -> None:
    x = torch.randn(2, 5, D)
    residuals = resfx.rewrite(Model(), resfx.Review(), (x,)).residual_map
    assert "site 0 of stream 0" in residuals.explain("blocks.0")
    with pytest.raises(resfx.UnknownPlace):
        residuals.explain("blocks.7")


def test_a_reason_is_formatted_when_read(residuals: resfx.ResidualMap) -> None:
    node = residuals.sites[0].node
    rejected = Rejected(node, "shape", "{} is not {}", (node, 3))
    assert rejected.reason == f"{node.name} is not 3"


def test_to_dict_is_json(residuals: resfx.ResidualMap) -> None:
    data = json.loads(json.dumps(residuals.to_dict()))
    (stream,) = data["streams"]
    assert [site["path"] for site in stream["sites"]] == ["blocks.0", "blocks.1"]
    assert [site["index"] for site in stream["sites"]] == [0, 1]
    assert all(site["rewritable"] and site["kind"] == "plain" for site in stream["sites"])
    assert stream["axis"] == -1
    assert [miss["stage"] for miss in data["rejected"]] == ["learned"]


def test_print(residuals: resfx.ResidualMap) -> None:
    text = str(residuals)
    assert "1 residual stream, 2 sites" in text
    assert "blocks.0" in text
    assert "blocks.1" in text
    assert f"test_report.py:{residuals.sites[0].source.rsplit(':', 1)[1]}" in text
    assert "sums that are no residual update: 1; explain(path) tells why" in text
    assert max(len(line) for line in text.splitlines()) <= 140


@pytest.mark.parametrize(("depth", "rows"), [(3, [False, False, True]), (30, [False, True])])
def test_print_tells_which_sites_a_rewrite_left_plain(depth: int, rows: list[bool]) -> None:
    model, inputs = Model(depth).eval(), (torch.randn(2, 5, D),)
    some = resfx.rewrite(model, resfx.Review(), inputs, select=lambda site: site.index < 2).residual_map
    assert some.to_dict()["chosen"] == {"0": [0, 1]}
    table = [line for line in str(some).splitlines() if "test_report.py" in line]
    assert ["left as it was" in line for line in table] == rows
    assert "left as it was" not in str(resfx.rewrite(model, resfx.Review(), inputs).residual_map)


def test_print_of_many_sites_gathers_equal_ones() -> None:
    text = str(found(depth=30))
    assert "0..29 (30)" in text
    assert "blocks.0 .. blocks.29" in text


def test_loops_are_printed_and_in_the_data() -> None:
    looped = found(depth=2, turns=3)
    assert "run 3x" in str(looped)
    (loop,) = looped.to_dict()["loops"]
    assert (loop["count"], loop["branches"]) == (3, 2)


def test_print_of_nothing() -> None:
    empty = resfx.find(nn.Sequential(nn.Linear(D, D), nn.ReLU()), (torch.randn(2, D),))
    assert str(empty).startswith("no residual connection found")
    assert empty.sites == []
