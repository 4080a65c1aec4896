"""Stock Qwen3 rewritten to Delta Attention against the published code's numbers, with its weights' published names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriter_golden import (
    assert_golden,
    constant_parameters,
    golden,
    gradients,
    load_parameters,
    outputs_and_gradients,
)
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

import resfx

LAYERS = 4
CASES = {
    "qwen3_delta_f32": resfx.DeltaAttention(),
    "qwen3_delta": resfx.DeltaAttention(),
    "qwen3_delta_block_nb4": resfx.DeltaAttention(granularity="block", blocks=4, official_sources=True),
}
NORM_OF = {"attn": "input_layernorm", "mlp": "post_attention_layernorm"}


def stock() -> Qwen3ForCausalLM:
    """The golden files' configuration, default in everything else (the cache is on)."""
    config = Qwen3Config(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        vocab_size=97,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    assert config.use_cache
    return Qwen3ForCausalLM(config)


# The float64 files hold the model without Qwen3's own float32 casts, RoPE's apart.


class UncastRMSNorm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def uncast_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    key, value = (modeling_qwen3.repeat_kv(t, module.num_key_value_groups) for t in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    weights = (scores if mask is None else scores + mask).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def shifted_loss(logits: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def in_float64(model: Qwen3ForCausalLM, monkeypatch: pytest.MonkeyPatch) -> Qwen3ForCausalLM:
    monkeypatch.setattr(modeling_qwen3, "eager_attention_forward", uncast_attention)
    model.loss_function = shifted_loss
    for path, module in list(model.named_modules()):
        if isinstance(module, modeling_qwen3.Qwen3RMSNorm):
            model.set_submodule(path, UncastRMSNorm(module))
    return model.double()


def ours(name: str) -> str:
    """The published parameter name as resfx names it: layer l holds the sites 2 l (attention) and 2 l + 1 (MLP)."""
    if "_res_" not in name:
        return name
    layer, _, kind = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    branch, _, what = kind.partition("_res_")
    site = 2 * int(layer) + {"attn": 0, "mlp": 1}[branch]
    return f"residual.0.{site}.{'query' if what == 'proj' else 'key_norm'}"


def rewritten(case: str, monkeypatch: pytest.MonkeyPatch, labels: bool) -> resfx.Rewritten:
    """The case's model, rewritten on another batch than the golden one, with the published weights."""
    model = stock()
    if golden.meta(case)["dtype"] == "float64":
        model = in_float64(model, monkeypatch)
    tokens = torch.randint(0, 97, (3, 6))
    example = {"input_ids": tokens, "labels": tokens} if labels else {"input_ids": tokens}
    result = resfx.rewrite(model, CASES[case], (), example)
    params, _, refs = golden.load(case)
    values = {
        ours(name): torch.tensor(value).squeeze(0) if name.endswith("_res_proj.weight") else torch.tensor(value)
        for name, value in params.items()
    }
    load_parameters(result, values, {ours(name) for name in constant_parameters(refs)})
    return result


def run(model: resfx.Rewritten, case: str, labels: bool) -> dict[str, Any]:
    """Logits, loss and gradients under the published names."""
    params, inputs, _ = golden.load(case)
    tokens = torch.tensor(inputs["input_ids"])
    out = model(input_ids=tokens, labels=tokens) if labels else model(input_ids=tokens)
    loss = out.loss if labels else shifted_loss(out.logits, tokens)
    loss.backward()
    return {"logits": out.logits, "loss": loss, **gradients(model, {name: ours(name) for name in params}, params)}


def compare(model: resfx.Rewritten, case: str, labels: bool) -> None:
    refs = golden.load(case)[2]
    assert_golden(run(model, case, labels), outputs_and_gradients(refs), golden.meta(case)["dtype"])


def branch_inputs(model: resfx.Rewritten, refs: Mapping[str, Any]) -> dict[str, Tensor]:
    """What every branch's norm, the user's own module, receives in the next call, where the golden file holds it."""
    seen: dict[str, Tensor] = {}
    for layer in range(LAYERS):
        for branch, norm in NORM_OF.items():
            name = f"aux/h/{layer}.{branch}"
            if name in refs:
                module = model.get_submodule(f"model.layers.{layer}.{norm}")
                module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    return seen


# With labels the loss is the model's own, inside the rewritten graph; without, it is taken from the logits.
@pytest.mark.parametrize(
    ("case", "labels"), [("qwen3_delta", True), ("qwen3_delta_f32", True), ("qwen3_delta_block_nb4", False)]
)
def test_golden(case: str, labels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rewritten(case, monkeypatch, labels)
    refs = golden.load(case)[2]
    reads = branch_inputs(model, refs)
    compare(model, case, labels)
    expected = {name: value for name, value in refs.items() if name.startswith("aux/h/")}
    assert_golden(reads, expected, golden.meta(case)["dtype"])

    # One wrong weight is seen.
    model.zero_grad()
    with torch.no_grad():
        model.get_parameter("residual.0.5.query").mul_(1.01)
    with pytest.raises(AssertionError, match=r"differ: .*res_"):
        compare(model, case, labels)


def test_every_qwen3_file_is_covered() -> None:
    assert set(golden.cases("qwen3_*")) == set(CASES)
