"""generate() of an attached model: its cache, its padding, sampling, and how often Dynamo has to compile."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_helpers import perturb
from live_transformers import DECODERS, T5, generated, padded, prompt, recomputed, tokens

import resfx

FORMS = {"gpt2": resfx.DeltaAttention(), "llama": resfx.MultiGate(streams=2), "qwen3": resfx.AttentionResidual()}
PROMPTS = {"batch": prompt, "left padding": padded}


def attached(name: str, form: resfx.Form, backend: str = "eager", **options: Any) -> Any:
    torch._dynamo.reset()
    model = DECODERS[name]()
    example = {**prompt(), "position_ids": torch.arange(5).expand(2, -1)}
    resfx.attach(model, form, (), example, backend=backend, **options)
    return model


def check(name: str, form: resfx.Form, given: dict[str, torch.Tensor], backend: str, **options: Any) -> None:
    """Tokens with the cache are those of the static rewrite, which runs the whole sequence for every token."""
    model = attached(name, form, backend)
    perturb(model, std=0.3)
    example = {**prompt(), "position_ids": torch.arange(5).expand(2, -1)}
    static = resfx.rewrite(DECODERS[name](), form, (), example)
    static.load_state_dict(model.state_dict())
    steps = 16 if backend == "eager" else 64
    mine = generated(model, given, steps, **options)
    assert torch.equal(mine, recomputed(static, given, steps))
    assert not torch.equal(mine, generated(DECODERS[name](), given, steps))


@pytest.mark.parametrize(("name", "given"), [("gpt2", "batch"), ("qwen3", "left padding")])
def test_greedy_as_recomputed_by_the_static_rewrite(name: str, given: str) -> None:
    check(name, FORMS[name], PROMPTS[given](), "eager")


def test_a_static_cache() -> None:
    check("llama", FORMS["llama"], padded(), "eager", cache_implementation="static")


def test_a_warm_start_samples_the_same_tokens() -> None:
    model = attached("qwen3", resfx.AttentionResidual(), warm_start=True)
    mine = generated(model, padded(), do_sample=True)
    assert torch.equal(mine, generated(DECODERS["qwen3"](), padded(), do_sample=True))


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static"}, {"do_sample": True}], ids=["greedy", "static cache", "sampling"]
)
def test_recompilations_are_few_with_left_padding(options: dict[str, Any]) -> None:
    graphs = []

    def counting(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = attached("llama", resfx.DeltaAttention(), counting)  # type: ignore[arg-type]
    generated(model, padded(), **options)
    assert len(graphs) <= 4


def test_recompilations_are_few() -> None:
    """Sixty-four steps: the prompt, the first step, and one graph for all steps after it."""
    graphs = []

    def counting(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    model = attached("llama", resfx.DeltaAttention(), counting)  # type: ignore[arg-type]
    generated(model, prompt())
    first = len(graphs)
    assert first <= 4
    generated(model, prompt())
    generated(model, padded(), 20)
    assert len(graphs) <= first + 3


def t5_attached(form: resfx.Form, **options: Any) -> Any:
    torch._dynamo.reset()
    model = T5()
    example = {"input_ids": tokens(), "decoder_input_ids": tokens(2, 4)}
    resfx.attach(model, form, (), example, backend="eager", **options)
    return model


def test_an_encoder_that_generate_calls_by_itself() -> None:
    """T5: both streams are rewritten, the encoder's through a call that does not pass through the model's forward."""
    form = resfx.DeltaAttention()
    model = t5_attached(form)
    names = {name.split(".")[1] for name in model.state_dict() if name.startswith("residual.")}
    assert names == {"0", "1"}
    perturb(model)
    static = resfx.rewrite(T5(), form, (), {"input_ids": tokens(), "decoder_input_ids": tokens(2, 4)})
    static.load_state_dict(model.state_dict())
    mine = generated(model, {"input_ids": tokens(2, 7)}, 12)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    with torch.no_grad():
        for _ in range(12):
            logits = static(input_ids=tokens(2, 7), decoder_input_ids=ids).logits
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(mine, ids)
    assert not torch.equal(mine, generated(T5(), {"input_ids": tokens(2, 7)}, 12))


@pytest.mark.slow
@pytest.mark.parametrize("given", PROMPTS)
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_with_inductor(name: str, cache: str | None, given: str) -> None:
    options = {} if cache is None else {"cache_implementation": cache}
    check(name, FORMS[name], PROMPTS[given](), "inductor", **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("given", PROMPTS)
def test_warm_start_with_inductor(name: str, sampling: bool, given: str) -> None:
    model = attached(name, FORMS[name], "inductor", warm_start=True)
    mine = generated(model, PROMPTS[given](), do_sample=sampling)
    assert torch.equal(mine, generated(DECODERS[name](), PROMPTS[given](), do_sample=sampling))
