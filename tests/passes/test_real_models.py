"""Forms on models as people have them, against the eager reference run on the models' own submodules, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from passes_reference import REFERENCES
from passes_toys import perturb, relative
from torch import Tensor, nn

import resfx
from resfx.demo import GPT
from resfx.passes.form import Form

Branches = Sequence[Callable[[Tensor], Tensor]]
IDS = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(1))
SIZES = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}


def stream(
    form: Form, new: dict[str, Tensor], h0: Tensor, branches: Branches, norms: Sequence[nn.Module] = ()
) -> Tensor:
    """The end of the model's one stream under `form`."""
    reference: Any = REFERENCES[form.name](
        form, lambda owner, name: new.get(f"residual.0.{owner}.{name}"), h0, [*range(len(branches))], -1
    )
    for site, branch in enumerate(branches):
        reference.write(site, branch(reference.read(site)))
        if norms:
            reference.norm(norms[site])
    return reference.end("final")


def gpt(form: Form, new: dict[str, Tensor], model: GPT) -> Tensor:
    branches: list[Callable[[Tensor], Tensor]] = []
    for block in model.blocks:
        branches.append(lambda x, b=block: b.attention(b.norm1(x)))
        branches.append(lambda x, b=block: b.mlp(b.norm2(x)))
    h0 = model.tokens(IDS) + model.positions(torch.arange(IDS.shape[1]))
    return model.head(model.norm(stream(form, new, h0, branches)))


def qwen3(form: Form, new: dict[str, Tensor], model: Any) -> Tensor:
    inner = model.model
    h0 = inner.embed_tokens(IDS)
    positions = inner.rotary_emb(h0, torch.arange(IDS.shape[1])[None])
    branches: list[Callable[[Tensor], Tensor]] = []
    for layer in inner.layers:
        branches.append(lambda x, m=layer: m.self_attn(m.input_layernorm(x), positions, None)[0])
        branches.append(lambda x, m=layer: m.mlp(m.post_attention_layernorm(x)))
    return model.lm_head(inner.norm(stream(form, new, h0, branches)))


def bert(form: Form, new: dict[str, Tensor], model: Any) -> Tensor:
    """Post-norm."""
    branches: list[Callable[[Tensor], Tensor]] = []
    norms: list[nn.Module] = []
    for layer in model.encoder.layer:
        branches.append(lambda x, m=layer.attention: m.output.dense(m.self(x)[0]))
        branches.append(lambda x, m=layer: m.output.dense(m.intermediate(x)))
        norms += [layer.attention.output.LayerNorm, layer.output.LayerNorm]
    return stream(form, new, model.embeddings(IDS), branches, norms)


def make_qwen3() -> nn.Module:
    config = transformers.Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=8, pad_token_id=0)
    return transformers.Qwen3ForCausalLM(config)


def make_bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], Callable[[Any], Tensor]]] = {
    "gpt": (GPT, gpt, lambda out: out),
    "qwen3": (make_qwen3, qwen3, lambda out: out.logits),
    "bert": (make_bert, bert, lambda out: out.last_hidden_state),
}
FORMS: list[Form] = [
    resfx.AttentionResidual(),
    resfx.MultiGate(streams=2, gate="competitive"),
    resfx.Review(),
    resfx.AttentionResidual(granularity="block", blocks=2),
    resfx.DeltaAttention(granularity="block", block_size=2, gate="vector", null_source=True),
    resfx.DeltaAttention(granularity="block", block_size=1, official_sources=True),
    resfx.DeltaAttention(seeded=True),
    resfx.MultiGate(streams=3),
    resfx.Highway(convex=True),
    resfx.ScaledLoop(learnable=True),
]
DEFAULT = {("gpt", "review"), ("qwen3", "attention_residual"), ("bert", "multi_gate(streams=2, gate=competitive)")}


def cases() -> list[Any]:
    return [
        pytest.param(
            name,
            form,
            id=f"{name}-{form.to_spec()}",
            marks=[] if (name, form.to_spec()) in DEFAULT else [pytest.mark.slow],
        )
        for name in MODELS
        for form in FORMS
    ]


@pytest.mark.parametrize(("name", "form"), cases())
def test_outputs_and_gradients(name: str, form: Form) -> None:
    make, reference, picked = MODELS[name]
    torch.manual_seed(0)
    model = make().eval().double()
    kwargs = {"tokens" if name == "gpt" else "input_ids": IDS}
    result = resfx.rewrite(model, form, (), kwargs)
    perturb(result)
    new = {n: p.detach().clone().requires_grad_() for n, p in result.named_parameters() if n.startswith("residual.")}
    actual, expected = picked(result(**kwargs)), reference(form, new, model)
    assert relative(actual, expected) < 1e-9
    weight = torch.linspace(-1, 1, actual.numel(), dtype=actual.dtype).reshape(actual.shape).sin()
    (actual * weight).sum().backward()
    (expected * weight).sum().backward()
    theirs = {**dict(model.named_parameters()), **new}
    scale = max(float(p.grad.norm()) for p in theirs.values() if p.grad is not None)
    for parameter, p in result.named_parameters():
        want = theirs[parameter].grad
        assert (p.grad is None) == (want is None), parameter
        if want is not None:
            assert float((p.grad - want).norm()) < 1e-9 * max(float(want.norm()), 1e-3 * scale), parameter


def test_a_form_on_another_model_is_seen() -> None:
    """The comparison can fail: the plain model is none of them."""
    torch.manual_seed(0)
    model = GPT().eval().double()
    result = resfx.rewrite(model, resfx.Review(), (IDS,))
    assert relative(result(IDS), gpt(resfx.Standard(), {}, model)) > 1e-3
