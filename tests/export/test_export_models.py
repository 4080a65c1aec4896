"""to_onnx on models of the libraries people use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resfx.export import to_onnx

transformers = pytest.importorskip("transformers")
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100}


def test_bert(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**TINY))
    tokens = torch.randint(0, 100, (1, 7))
    report = to_onnx(model, tmp_path / "m.onnx", (tokens,), {"attention_mask": torch.ones_like(tokens)})
    assert [port.dynamic for port in report.inputs] == [(0, 1), (0, 1)]
    assert {check.batch for check in report.checks} == {"batch 1", "batch 2"}
    assert {port.name for port in report.outputs} == {"last_hidden_state", "pooler_output"}


def test_gpt2_leaves_its_cache_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=100, bos_token_id=0, eos_token_id=0)
    report = to_onnx(transformers.GPT2LMHeadModel(config), tmp_path / "m.onnx", (torch.randint(0, 100, (2, 7)),))
    assert [port.name for port in report.outputs] == ["logits"]
    assert any("DynamicCache" in note for note in report.notes)


@pytest.mark.slow
def test_t5(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, vocab_size=100)
    tokens = torch.randint(0, 100, (2, 5))
    kwargs = {"input_ids": tokens, "decoder_input_ids": tokens, "use_cache": False}
    report = to_onnx(transformers.T5ForConditionalGeneration(config), tmp_path / "m.onnx", (), kwargs)
    assert report.inputs[0].shape == ("batch", "input_ids_dim1")
    assert report.inputs[1].shape == ("batch", "decoder_input_ids_dim1")


def test_resnet18(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    report = to_onnx(torchvision.models.resnet18(), tmp_path / "m.onnx", (torch.randn(2, 3, 64, 64),))
    assert report.inputs[0].dynamic == (0, 2, 3)
    assert len(report.checks) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Gemma2", "Mamba"])
def test_decoders(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    keys = {} if name == "Mamba" else {"num_key_value_heads": 1, "head_dim": 16}
    config = getattr(transformers, f"{name}Config")(**TINY, **keys)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    report = to_onnx(model, tmp_path / "m.onnx", (torch.randint(0, 100, (2, 7)),), {"use_cache": False})
    assert report.inputs[0].shape[0] == "batch"
