"""The models of the matrix: tiny random configurations of public architectures, built offline.

`ZOO[name].build()` gives a model in eval mode and one example call. The expected counts were read from the models'
source: `streams` lists the sites of each stream in execution order, `adds` the source text of the adds and how often
each one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torchvision
from models_builders import (
    DECODER,
    ENCODER,
    Inputs,
    base,
    causal,
    features,
    ids,
    image,
    masked,
    pixels,
    t5,
    timm_cait,
    timm_convnext_v2,
    timm_swin,
    timm_vit,
    tokens,
    torchvision_convnext,
    torchvision_swin,
    torchvision_vit,
    transformer_encoder,
    two_sequences,
)
from models_nanogpt import GPT, GPTConfig
from torch import nn


@dataclass(frozen=True)
class Entry:
    """One model. `inputs(batch)` gives (args, kwargs); `longer(batch)` too, with longer sequences."""

    make: Callable[[], nn.Module]
    inputs: Inputs
    streams: tuple[int, ...]
    adds: Mapping[str, int]
    branches: int | None = None  # total over all sites; one a site by default
    loops: tuple[tuple[int, int], ...] = ()  # (N, L)
    transition: tuple[str, ...] | None = None  # of every site, where it is one and the same
    longer: Inputs | None = None
    refused: Inputs | None = None  # sizes that the model's own code fixes when it is traced
    small: bool = False  # cheap enough to compile and export in the default run
    heavy: bool = False  # rewritten in the slow part only

    def build(self) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """(model in eval mode, args, kwargs) for a batch of 2."""
        torch.manual_seed(0)
        model = self.make().eval()
        # With the libraries' own start, often 0.02, the branches of so narrow a model hardly move the state.
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.2)
        args, kwargs = self.inputs(2)
        _settle(model, *self.inputs(16))
        return model, args, kwargs


def _settle(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """BatchNorm statistics of a few inputs: with those of the start, values vanish on the way through an untrained network."""
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    if not norms:
        return
    kept = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = None  # a plain average over the calls
    with torch.no_grad():
        model.train()(*args, **kwargs)
    model.eval()
    for norm, momentum in zip(norms, kept, strict=True):
        norm.momentum = momentum
        norm.num_batches_tracked.zero_()


LAYER_NORM = ("layer_norm",)
TIMM_ATTENTION = "x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))"
TIMM_MLP = "x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))"
TIMM_CONVNEXT = "x = self.drop_path(x) + self.shortcut(shortcut)"
PLUS = "hidden_states = residual + hidden_states"

ZOO: dict[str, Entry] = {
    "nanogpt": Entry(
        lambda: GPT(GPTConfig()),
        lambda b: ((ids(b),), {}),
        (4,),
        {"x = x + self.attn(self.ln_1(x))": 2, "x = x + self.mlp(self.ln_2(x))": 2},
        longer=lambda b: ((ids(b, 11),), {}),
        small=True,
    ),
    "gpt2": Entry(
        causal("gpt2", vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2),
        tokens(8),
        (4,),
        {"hidden_states = attn_output + residual": 2, "hidden_states = residual + feed_forward_hidden_states": 2},
        longer=tokens(11),
    ),
    "llama": Entry(causal("llama", **DECODER), tokens(8), (4,), {PLUS: 4}, longer=tokens(11)),
    "qwen3": Entry(causal("qwen3", **DECODER), tokens(8), (4,), {PLUS: 4}, longer=tokens(11)),
    "gemma2": Entry(causal("gemma2", **DECODER), tokens(8), (4,), {PLUS: 4}, longer=tokens(11)),
    "gpt_neox": Entry(
        causal("gpt_neox", **ENCODER, use_parallel_residual=True),
        tokens(8),
        (2,),
        {"hidden_states = mlp_output + attn_output + hidden_states": 2},
        branches=4,
        longer=tokens(11),
    ),
    "falcon": Entry(
        causal(
            "falcon",
            vocab_size=99,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            parallel_attn=True,
            new_decoder_architecture=False,
            multi_query=True,
            initializer_range=0.2,
        ),
        tokens(8),
        (2,),
        {"out = residual + out": 2},
        branches=4,
        longer=tokens(11),
    ),
    "mixtral": Entry(
        causal("mixtral", **DECODER, num_local_experts=4, num_experts_per_tok=2),
        tokens(8),
        (4,),
        {PLUS: 4},
        longer=tokens(11),
    ),
    "mamba": Entry(
        causal(
            "mamba",
            vocab_size=99,
            hidden_size=32,
            state_size=4,
            num_hidden_layers=3,
            time_step_rank=4,
            initializer_range=0.2,
        ),
        tokens(8),
        (1, 3, 1, 1),  # the D skip of each scan, y + D x, is a scaled identity of its own
        {PLUS: 3, "scan_output = scan_output + hidden_states * D[None, :, None]": 3},
        refused=tokens(11),  # the scan is a Python loop over the length
        heavy=True,
    ),
    "bert": Entry(
        base("bert", **ENCODER),
        masked(8),
        (4,),
        {"hidden_states = self.LayerNorm(hidden_states + input_tensor)": 4},
        transition=LAYER_NORM,
        longer=masked(11),
        small=True,
    ),
    "albert": Entry(
        base(
            "albert",
            vocab_size=99,
            embedding_size=16,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=64,
            initializer_range=0.2,
        ),
        masked(8),
        (6,),
        {
            "attn_output = self.LayerNorm(hidden_states + attn_output)": 3,
            "hidden_states = self.full_layer_layer_norm(ffn_output + attention_output)": 3,
        },
        loops=((3, 2),),
        transition=LAYER_NORM,
        longer=masked(11),
    ),
    "vit": Entry(
        base(
            "vit",
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=32,
            patch_size=8,
            initializer_range=0.2,
        ),
        pixels,
        (4,),
        {"hidden_states = hidden_states + residual": 4},
    ),
    "t5": Entry(
        t5,
        two_sequences(0),
        (4, 6),
        {
            "attention_output = hidden_states + self.dropout(attention_output)": 4,
            "layer_output = hidden_states + self.dropout(attention_output)": 2,
            "hidden_states = hidden_states + self.dropout(forwarded_states)": 4,
        },
        longer=two_sequences(3),
    ),
    "torchvision_resnet18": Entry(
        lambda: torchvision.models.resnet18(num_classes=10),
        image(64),
        (2, 1, 1, 1),
        {"out += identity": 5},
        transition=("relu",),
    ),
    "torchvision_vit": Entry(torchvision_vit, image(32), (4,), {"x = x + input": 2, "return x + y": 2}),
    "torchvision_swin": Entry(
        torchvision_swin,
        image(32),
        (4, 4),
        {
            "x = x + self.stochastic_depth(self.attn(self.norm1(x)))": 4,
            "x = x + self.stochastic_depth(self.mlp(self.norm2(x)))": 4,
        },
    ),
    "torchvision_convnext": Entry(torchvision_convnext, image(32), (2, 2), {"result += input": 4}, small=True),
    "torchvision_efficientnet_b0": Entry(
        lambda: torchvision.models.efficientnet_b0(num_classes=10), image(64), (1, 1, 2, 2, 3), {"result += input": 9}
    ),
    "timm_vit": Entry(timm_vit, image(32), (4,), {TIMM_ATTENTION: 2, TIMM_MLP: 2}),
    "timm_test_vit": Entry(
        lambda: timm.create_model("test_vit", num_classes=10), image(160), (12,), {TIMM_ATTENTION: 6, TIMM_MLP: 6}
    ),
    "timm_swin": Entry(
        timm_swin,
        image(32),
        (4, 4),
        {
            "x = x + self.drop_path1(self._attn(self.norm1(x)))": 4,
            "x = x + self.drop_path2(self.mlp(self.norm2(x)))": 4,
        },
    ),
    "timm_cait": Entry(
        timm_cait,
        image(32),
        (4, 4),
        {
            "x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x)))": 2,
            "x = x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))": 2,
            "x_cls = x_cls + self.drop_path(self.gamma_1 * self.attn(self.norm1(u)))": 2,
            "x_cls = x_cls + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x_cls)))": 2,
        },
    ),
    "timm_test_convnext": Entry(
        lambda: timm.create_model("test_convnext", num_classes=10, ls_init_value=0.5),
        image(64),
        (1, 2, 4, 2),
        {TIMM_CONVNEXT: 9},
    ),
    "timm_convnext_v2": Entry(timm_convnext_v2, image(64), (1, 1, 2, 1), {TIMM_CONVNEXT: 5}),
    "transformer_encoder": Entry(
        transformer_encoder(False),
        features(6),
        (4,),
        {"x": 2, "x = self.norm2(x + self._ff_block(x))": 2},  # torch's own lines: there is no other frame
        transition=LAYER_NORM,
        longer=features(9),
    ),
    "transformer_encoder_pre": Entry(
        transformer_encoder(True),
        features(6),
        (4,),
        {"x = x + self._sa_block(": 2, "x = x + self._ff_block(self.norm2(x))": 2},
        longer=features(9),
    ),
}
