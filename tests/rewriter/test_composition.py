"""Different forms on different streams of one model, and rewriting a rewritten model."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

import resfx

GATES, DELTA = resfx.MultiGate(streams=2), resfx.DeltaAttention()
Call = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(size), nn.Linear(size, size)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return x + self.inner(self.norm(x) + other).tanh()


class Pair(nn.Module):
    """An encoder, and a decoder that reads it in every block: called as T5 is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 8)
        self.encoder = nn.ModuleList(Block(8) for _ in range(4))
        self.decoder = nn.ModuleList(Block(8) for _ in range(6))

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        x, y = self.embed(input_ids), self.embed(decoder_input_ids)
        for block in self.encoder:
            x = block(x, x.new_zeros(()))
        context = x.mean(1, keepdim=True)
        for block in self.decoder:
            y = block(y, context)
        return y


@functools.cache
def pair() -> Pair:
    torch.manual_seed(0)
    return Pair().eval()


@functools.cache
def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=31,
        d_model=16,
        d_kv=4,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        initializer_factor=2.0,
    )
    return T5ForConditionalGeneration(config).eval()


@functools.cache
def call() -> Call:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 31, (2, 9), generator=generator)
    return {"input_ids": tokens[:, :5], "decoder_input_ids": tokens[:, 5:]}


MODELS: dict[str, Callable[[], nn.Module]] = {"pair": pair, "t5": t5}


@functools.cache
def encoder_only(name: str = "pair") -> resfx.Rewritten:
    model = resfx.rewrite(MODELS[name](), GATES, (), call(), select="encoder.*")
    shake(model)
    return model


@functools.cache
def both(name: str = "pair") -> resfx.Rewritten:
    model = resfx.rewrite(encoder_only(name), DELTA, (), call(), select="decoder.*")
    shake(model, stream=1)
    return model


def residual(model: nn.Module, stream: int | None = None) -> dict[str, nn.Parameter]:
    start = "residual." if stream is None else f"residual.{stream}."
    return {name: p for name, p in model.named_parameters() if name.startswith(start)}


def shake(model: nn.Module, stream: int | None = None) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in residual(model, stream).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)


def logits(model: nn.Module) -> Tensor:
    output: Any = model(**call())
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.parametrize("name", MODELS)
def test_encoder_and_decoder_by_glob(name: str) -> None:
    model = both(name)
    assert model.residual_map.forms == {0: GATES.to_spec(), 1: DELTA.to_spec()}
    assert not model.residual_map.refused
    gates = {f"residual.0.{site}.{name}" for site in range(4) for name in ("w_alpha", "w_beta", "b_beta")}
    assert set(residual(model, 0)) == gates - {"residual.0.0.w_beta", "residual.0.0.b_beta"}
    assert set(residual(model, 1)) == {f"residual.1.{site}.{n}" for site in range(1, 6) for n in ("query", "key_norm")}
    assert set(model.state_dict()) - set(residual(model)) == set(MODELS[name]().state_dict())


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_counts_and_learns(name: str) -> None:
    model = copy.deepcopy(both(name))
    before = logits(model)
    for own, parameter in residual(model).items():
        value = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(torch.linspace(-1, 1, parameter.numel()))
            assert (logits(model) - before).abs().max() > 1e-5, own
            parameter.copy_(value)
    logits(model).square().mean().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in residual(model).values())


def test_first_rewrite_keeps_its_parameters_and_numbers() -> None:
    first = encoder_only()
    second = resfx.rewrite(first, DELTA, (), call(), warm_start=True)
    assert residual(second, 0).keys() == residual(first).keys()
    for name, parameter in residual(first).items():
        assert torch.equal(second.get_parameter(name), parameter)
        assert second.get_parameter(name) is not parameter
    torch.testing.assert_close(logits(second), logits(first), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logits(first), logits(pair()), atol=1e-3)


def test_without_a_copy_they_are_the_same_parameters() -> None:
    first = copy.deepcopy(encoder_only())
    second = resfx.rewrite(first, DELTA, (), call(), copy=False)
    assert all(second.get_parameter(name) is parameter for name, parameter in first.named_parameters())


def test_order_does_not_matter() -> None:
    decoder = resfx.rewrite(pair(), DELTA, (), call(), select=["decoder.*"])
    assert decoder.residual_map.forms == {1: DELTA.to_spec()}
    model = resfx.rewrite(decoder, GATES, (), call(), streams=0)
    assert set(model.state_dict()) == set(both().state_dict())
    model.load_state_dict(both().state_dict())
    assert torch.equal(logits(model), logits(both()))


@pytest.mark.parametrize("name", MODELS)
def test_reverting_one_leaves_the_other(name: str) -> None:
    model = resfx.revert(both(name), streams=1)
    assert torch.equal(logits(model), logits(encoder_only(name)))
    assert torch.equal(logits(resfx.revert(both(name))), logits(MODELS[name]()))


def test_another_form_after_reverting() -> None:
    model = resfx.revert(both(), streams=1)
    again = resfx.rewrite(model, resfx.Review(), (), call(), select="decoder.*")
    assert again.residual_map.forms == {0: GATES.to_spec(), 1: "review"}
    assert torch.equal(logits(resfx.revert(again)), logits(pair()))


def test_same_stream_is_refused_until_reverted() -> None:
    with pytest.raises(resfx.SelectionError, match=r"stream 0 is rewritten already; resfx.revert gives"):
        resfx.rewrite(encoder_only(), DELTA, (), call(), streams=[0, 1])
    with pytest.raises(resfx.SelectionError, match=r"'encoder.\*' matches sites of stream 0 alone, which is rewritten"):
        resfx.rewrite(encoder_only(), DELTA, (), call(), select="encoder.*")
    with pytest.raises(resfx.SelectionError, match="every stream of this model is rewritten already"):
        resfx.rewrite(both(), DELTA, (), call())
    plain = resfx.revert(encoder_only())
    assert resfx.rewrite(plain, DELTA, (), call(), select="encoder.*").residual_map.forms == {0: DELTA.to_spec()}


def test_part_of_a_stream() -> None:
    part = resfx.rewrite(
        pair(), DELTA, (), call(), select=lambda site: site.path.startswith(("decoder.3", "decoder.4", "decoder.5"))
    )
    assert {name.split(".")[2] for name in residual(part)} == {"3", "4", "5"}
    assert part.residual_map.forms == {1: DELTA.to_spec()}
    with pytest.raises(resfx.SelectionError, match="stream 1 alone, which is rewritten"):
        resfx.rewrite(part, GATES, (), call(), select="decoder.0")


def test_a_glob_that_matches_nothing() -> None:
    with pytest.raises(resfx.NoResidualFound, match=r"'middle.\*' matches no site; sites are in: decoder.0"):
        resfx.rewrite(pair(), DELTA, (), call(), select="middle.*")
    with pytest.raises(resfx.RewriteError, match=r"stream 1 .* no site of it is selected"):
        resfx.rewrite(pair(), DELTA, (), call(), select="encoder.*", streams=[0, 1])
