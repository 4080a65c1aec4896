"""Tiny random decoders and encoders of the transformers library, and what generation is compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

transformers.logging.set_verbosity_error()

VOCABULARY, STEPS = 61, 64
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], Any]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return make().eval()

    return build


def _gpt2() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": VOCABULARY}
    config = transformers.GPT2Config(**sizes, initializer_range=0.2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None, pad_token_id=0)
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # with the library's own start every model says one token for ever
    return model


DECODERS: dict[str, Callable[[], Any]] = {
    "gpt2": _seeded(_gpt2),
    "llama": _seeded(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES))),
    "qwen3": _seeded(lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_SIZES, head_dim=8))),
}
T5 = _seeded(_t5)


def tokens(batch: int = 2, length: int = 5, seed: int = 0) -> torch.Tensor:
    """Token ids without the padding token."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def padded() -> dict[str, torch.Tensor]:
    """A batch of two prompts of different lengths, padded on the left."""
    ids, mask = tokens(2, 6), torch.ones(2, 6, dtype=torch.int64)
    ids[0, :2], mask[0, :2] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def prompt() -> dict[str, torch.Tensor]:
    """A batch of two prompts of one length."""
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def recomputed(model: nn.Module, given: dict[str, torch.Tensor], steps: int) -> torch.Tensor:
    """Greedy tokens by running the whole sequence for each: what a model without a cache does."""
    ids, mask = given["input_ids"], given["attention_mask"]
    with torch.no_grad():
        for _ in range(steps):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(ids, attention_mask=mask, position_ids=positions).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids


def generated(model: Any, given: dict[str, torch.Tensor], steps: int = STEPS, **options: Any) -> torch.Tensor:
    """Tokens by the library's own generate; greedy unless `options` say otherwise."""
    torch.manual_seed(7)
    chosen = {"do_sample": False, **options}
    result: torch.Tensor = model.generate(**given, max_new_tokens=steps, **chosen)
    return result
