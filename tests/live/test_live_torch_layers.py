"""Models that are torch's own layers: Dynamo leaves out torch's lines, and torch fuses a whole layer where gradients are off."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from live_helpers import Pair, assert_close
from torch import nn

import resfx

SIZES: dict[str, Any] = {"nhead": 2, "dim_feedforward": 32, "batch_first": True, "dropout": 0.0}


def encoder_layer(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(16, **SIZES, norm_first=norm_first)


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, **SIZES, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(16), enable_nested_tensor=not norm_first)


def decoder(norm_first: bool) -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, **SIZES, norm_first=norm_first), 1)


def both(norm_first: bool) -> nn.Module:
    return nn.Transformer(16, num_encoder_layers=1, num_decoder_layers=1, **SIZES, norm_first=norm_first)


def inputs(count: int, batch: int = 2, length: int = 5) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(batch, length, 16, generator=generator) for _ in range(count))


def pair_of(make: Callable[[bool], nn.Module], norm_first: bool, count: int) -> Pair:
    def seeded() -> nn.Module:
        torch.manual_seed(0)
        return make(norm_first).eval()

    return Pair(seeded, resfx.DeltaAttention(), inputs(count))


@pytest.mark.parametrize(
    ("make", "count", "norm_first"),
    [(encoder_layer, 1, False), (encoder, 1, True), (encoder, 1, False), (decoder, 2, True), (both, 2, False)],
)
def test_as_the_static_rewrite(make: Callable[[bool], nn.Module], count: int, norm_first: bool) -> None:
    pair = pair_of(make, norm_first, count)
    pair.assert_same(*inputs(count))
    pair.assert_same(*inputs(count, 3, 7))
    with torch.no_grad():
        pair.assert_same(*inputs(count), gradients=False)
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_padding_mask() -> None:
    """torch would go over to nested tensors."""
    pair = pair_of(encoder, False, 1)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 3:] = True
    with torch.no_grad():
        live = pair.live(*inputs(1), src_key_padding_mask=mask)
        static = resfx.rewrite(
            pair.plain, resfx.DeltaAttention(), inputs(1), {"src_key_padding_mask": torch.zeros_like(mask)}
        )
        static.load_state_dict(pair.live.state_dict())
        assert_close([live[~mask]], [static(*inputs(1), src_key_padding_mask=mask)[~mask]])


def test_two_threads_at_once() -> None:
    """The fused layers are off as long as one call runs, and on again after the last."""
    pairs = [pair_of(encoder, norm_first, 1) for norm_first in (True, False)]
    with torch.no_grad():
        wanted = [pair.static(*inputs(1)) for pair in pairs]
        for pair in pairs:
            pair.live(*inputs(1))
    together = Barrier(2)

    def call(pair: Pair) -> list[torch.Tensor]:
        with torch.no_grad():
            together.wait()
            return [pair.live(*inputs(1)) for _ in range(30)]

    with ThreadPoolExecutor(2) as pool:
        for results, expected in zip(pool.map(call, pairs), wanted, strict=True):
            assert_close(results, [expected] * 30)
    assert torch.backends.mha.get_fastpath_enabled()
