"""The note on a key/value cache is given where the model's own call returns one, and only there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import resfx
from resfx.libraries import CACHE_NOTE

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}


def gpt() -> nn.Module:
    return transformers.GPT2Model(transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=50))


def encoder() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL))


def decoder() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL, is_decoder=True))


def encoder_decoder() -> nn.Module:
    return transformers.T5Model(
        transformers.T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50)
    )


def notes(model: nn.Module, **options: Any) -> list[str]:
    ids = torch.randint(0, 50, (2, 6))
    kwargs = (
        {"input_ids": ids, "decoder_input_ids": ids} if isinstance(model, transformers.T5Model) else {"input_ids": ids}
    )
    return resfx.find(model.eval(), (), {**kwargs, **options}).notes


@pytest.mark.parametrize("build", [gpt, decoder, encoder_decoder])
def test_a_model_that_returns_a_cache(build: Any) -> None:
    model = build().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert CACHE_NOTE in notes(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.use_cache


def test_an_encoder() -> None:
    model = encoder()
    assert model.config.use_cache
    assert CACHE_NOTE not in notes(model)


def test_a_call_without_cache() -> None:
    assert CACHE_NOTE not in notes(gpt(), use_cache=False)


def test_a_rewrite_says_it_once() -> None:
    ids = torch.randint(0, 50, (2, 6))
    assert resfx.rewrite(gpt(), resfx.Review(), (), {"input_ids": ids}).residual_map.notes.count(CACHE_NOTE) == 1
