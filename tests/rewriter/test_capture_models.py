"""Real models, tiny configurations, default settings: folded they give what they gave before."""

from __future__ import annotations

import copy
import linecache
from collections.abc import Callable
from typing import Any

import pytest
import torch
from capture_helpers import assert_same, fold_model, tensors
from torch import nn

import resfx
from resfx.capture import capture

transformers = pytest.importorskip("transformers")
torchvision = pytest.importorskip("torchvision")
timm = pytest.importorskip("timm")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
DECODER = {**SMALL, "num_key_value_heads": 2}


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 60, (batch, length), generator=torch.Generator().manual_seed(batch + length))


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    )


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)


def images(batch: int, _: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(batch)),), {}


def tokens(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"input_ids": ids(batch, length)}


def both_tokens(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), {"input_ids": ids(batch, length), "decoder_input_ids": ids(batch, length + 1)}


def vectors(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(batch)),), {}


Inputs = Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
# name: model, inputs, is it equal bit for bit (a causal mask that is only made while tracing changes the kernel)
MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs, bool]] = {
    "gpt2": (gpt2, tokens, False),
    "llama": (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)), tokens, False),
    "bert": (lambda: transformers.BertModel(transformers.BertConfig(**SMALL)), tokens, True),
    "t5": (t5, both_tokens, False),
    "mixtral": (
        lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_local_experts=4)),
        tokens,
        False,
    ),
    "resnet18": (torchvision.models.resnet18, images, True),
    "timm_vit": (
        lambda: timm.create_model("vit_tiny_patch16_224", depth=2, img_size=64, drop_path_rate=0.2),
        images,
        True,
    ),
    "encoder": (encoder, vectors, True),
}


@pytest.mark.parametrize("name", MODELS)
def test_folded_model_equals_the_original(name: str) -> None:
    torch.manual_seed(0)
    make, inputs, exact = MODELS[name]
    model = make()
    args, kwargs = inputs(2, 7)
    graphed, folded = fold_model(model, args, kwargs)
    assert folded.captured.mode == "train"
    assert_same(model, graphed, args, kwargs, exact=exact)

    other = inputs(3, 9)
    assert_same(model, graphed, *other, modes=(False,), backward=False, exact=exact)

    assert list(graphed.state_dict()) == list(model.state_dict())
    twin = copy.deepcopy(graphed)
    assert list(twin.state_dict()) == list(model.state_dict())
    model.eval()
    twin.eval()
    with torch.no_grad():
        expected, got = graphed.eval()(*args, **kwargs), twin(*args, **kwargs)
    assert type(expected) is type(got)
    assert all(torch.equal(a, b) for a, b in zip(tensors(expected), tensors(got), strict=True))
    shared = {id(parameter) for parameter in twin.parameters()} & {id(parameter) for parameter in model.parameters()}
    assert not shared


def test_cache_is_switched_off_for_the_capture_only() -> None:
    model = gpt2().eval()
    graphed, _ = fold_model(model, (), {"input_ids": ids(1, 5)})
    assert model.config.use_cache is True
    output = graphed.eval()(ids(4, 6))
    assert type(output) is type(model(ids(4, 6)))
    assert output.past_key_values is None
    assert model(ids(4, 6)).past_key_values is not None
    with pytest.raises(Exception, match="use_cache"):
        graphed(ids(4, 6), use_cache=True)


def test_a_batch_of_one_stays_open() -> None:
    captured = capture(gpt2(), (), {"input_ids": ids(1, 5)})
    assert captured.open_dims == [("input_ids", 0), ("input_ids", 1)]


def test_tied_weights_stay_tied() -> None:
    model = gpt2()
    graphed, _ = fold_model(model, (), {"input_ids": ids(2, 5)})
    twin = copy.deepcopy(graphed)
    assert twin.get_parameter("lm_head.weight") is twin.get_parameter("transformer.wte.weight")


def test_a_model_of_torchs_own_has_source_lines() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    found = resfx.find(model, (torch.randn(2, 5, 8),))
    for site in found.sites:
        file, _, line = site.source.rpartition(":")
        assert file.endswith("transformer.py")
        text = "".join(linecache.getlines(file)[int(line) - 1 : int(line) + 1])  # the sum may go over two lines
        assert "+ self._sa_block" in text or "+ self._ff_block" in text
    assert len({site.source for site in found.sites}) == 2
