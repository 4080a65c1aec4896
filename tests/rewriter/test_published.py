"""Published Delta names and back, on the golden Qwen3 checkpoint."""

from __future__ import annotations

import functools

import pytest
import torch
from rewriter_golden import TOLERANCE, golden
from test_golden_qwen3 import stock
from torch import Tensor

import resfx

CASE = "qwen3_delta_f32"
FIRST = "model.layers.0.attn_res_"


@functools.cache
def model() -> resfx.Rewritten:
    torch.manual_seed(0)
    return resfx.rewrite(stock(), resfx.DeltaAttention(), (), {"input_ids": torch.randint(0, 97, (3, 6))})


def published() -> dict[str, Tensor]:
    return {name: torch.tensor(value) for name, value in golden.load(CASE)[0].items()}


def test_golden_numbers_and_back() -> None:
    state = published()
    converted = resfx.published_to_residual(state, model())
    assert not [name for name in converted if "_res_" in name]
    assert converted["residual.0.5.query"].equal(state["model.layers.2.mlp_res_proj.weight"][0])
    model().load_state_dict(converted)  # strict: every name is there, none is left over
    _, inputs, refs = golden.load(CASE)
    logits = model()(input_ids=torch.tensor(inputs["input_ids"])).logits
    assert golden.error(logits.detach(), refs["logits"]) <= TOLERANCE["float32"]

    back = resfx.residual_to_published(model())
    assert {name: value.shape for name, value in back.items()} == {name: value.shape for name, value in state.items()}
    assert all(back[name].equal(value) for name, value in state.items() if not name.startswith(FIRST))
    assert back[FIRST + "proj.weight"].equal(torch.zeros(1, 64))  # constant: filled with its start
    assert back[FIRST + "norm.weight"].equal(torch.ones(64))


def test_block_names_and_back() -> None:
    """In block form the first sites read one source only: they have no parameters, the published file has."""
    case = "qwen3_delta_block_nb4"
    form = resfx.DeltaAttention(granularity="block", blocks=4, official_sources=True)
    raw, inputs, refs = golden.load(case)
    ids = torch.tensor(inputs["input_ids"])
    model = resfx.rewrite(stock().double(), form, (), {"input_ids": ids})
    state = {name: torch.tensor(value) for name, value in raw.items()}
    model.load_state_dict(resfx.published_to_residual(state, model))
    # The library's RoPE is float32 in any model; test_golden_qwen3.py goes to 1e-9.
    assert golden.error(model(input_ids=ids).logits.detach(), refs["logits"]) <= TOLERANCE["float32"]

    back = resfx.residual_to_published(model)
    assert back.keys() == state.keys()
    filled = {name.partition("_res_")[0] for name, value in back.items() if not value.equal(state[name])}
    assert filled <= {"model.layers.0.attn", "model.layers.0.mlp", "model.layers.1.attn"}
    assert {name.split(".")[2] for name in model.residual_map.parameters} == {"3", "4", "5", "6", "7"}


def test_what_does_not_fit() -> None:
    state = published()
    query = state.pop("model.layers.3.mlp_res_proj.weight")
    with pytest.raises(resfx.PublishedNameError, match=r"nothing for residual\.0\.7\.query"):
        resfx.published_to_residual(state, model())
    with pytest.raises(resfx.PublishedNameError, match=r"model\.layers\.4\..* no site .*model\.layers\.0 \.\. .*3"):
        resfx.published_to_residual({"model.layers.4.mlp_res_proj.weight": query}, model())
    with pytest.raises(resfx.PublishedNameError, match=r"has shape \(1, 60\), the model's has \(64,\)"):
        resfx.published_to_residual({"model.layers.3.mlp_res_proj.weight": query[:, :60]}, model())
    with pytest.raises(resfx.NotRewritten, match="can't be given published names"):
        resfx.residual_to_published(stock())
