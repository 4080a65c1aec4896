"""The models of the matrix: tiny random configurations of public architectures, built offline.

`ZOO[name].build()` gives a model in eval mode and one example call. The expected counts were read from the models' source: `streams` lists the
sites of each stream in execution order, `adds` the source text of the adds and how often each one runs ("": all of it is inside torch itself).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
import torchvision
import transformers
from models_nanogpt import GPT, GPTConfig
from timm.models.cait import Cait
from timm.models.convnext import ConvNeXt as TimmConvNeXt
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One model. `inputs(batch)` gives (args, kwargs); `longer(batch)` too, with longer sequences, where the model leaves them open."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]
    streams: tuple[int, ...]
    adds: Mapping[str, int]
    branches: int | None = None  # total over all sites; one a site by default
    loops: tuple[tuple[int, int], ...] = ()  # (N, L)
    transition: tuple[str, ...] | None = None  # of every site, where it is one and the same
    longer: Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    small: bool = False  # cheap enough to compile and export in the default run
    onnx: str | None = None  # why ONNX can't take it
    eval_only: bool = False  # its train mode can't be captured

    def build(self) -> Call:
        """(model in eval mode, args, kwargs) for a batch of 2."""
        torch.manual_seed(0)
        model = self.make().eval()
        args, kwargs = self.inputs(2)
        return model, args, kwargs


def ids(batch: int, length: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (batch, length), generator=generator)


def image(size: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    def inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)),), {}

    return inputs


def named(name: str, length: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda batch: ((), {name: ids(batch, length)})


def tokens(length: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return named("input_ids", length)


def features(length: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda batch: ((torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(1)),), {})


def pixels(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, _ = image(32)(batch)
    return (), {"pixel_values": args[0]}


def masked(length: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    """Token ids and a mask that hides the end of the last row."""

    def inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[-1, -2:] = 0
        return (), {"input_ids": ids(batch, length), "attention_mask": mask}

    return inputs


def two_sequences(longer: int) -> Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda batch: (
        (),
        {"input_ids": ids(batch, 8 + longer), "decoder_input_ids": ids(batch, 5 + longer, seed=2)},
    )


# A wide start: with the libraries' own 0.02 the branches of so narrow a model hardly move the state.
DECODER = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
ENCODER = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip


def causal(config: str, **options: Any) -> Callable[[], nn.Module]:
    """A transformers decoder with its default settings, the cache on."""
    return lambda: transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(config, **options))


def base(config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: transformers.AutoModel.from_config(transformers.AutoConfig.for_model(config, **options))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0, initializer_factor=5.0
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def torchvision_vit() -> nn.Module:
    model = VisionTransformer(32, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=10)
    nn.init.normal_(model.heads.head.weight)  # torchvision starts the head at zero: every output would be zero
    return model


def torchvision_convnext() -> nn.Module:
    stages = [CNBlockConfig(16, 32, 2), CNBlockConfig(32, None, 2)]
    return ConvNeXt(stages, layer_scale=0.5, stochastic_depth_prob=0.1, num_classes=10)


def torchvision_swin() -> nn.Module:
    return SwinTransformer([4, 4], embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=[4, 4], num_classes=10)


def timm_convnext_v2() -> nn.Module:
    """ConvNeXt V2: GRN in the MLP, no LayerScale, DropPath."""
    return TimmConvNeXt(
        num_classes=10, depths=(1, 1, 2, 1), dims=(8, 16, 24, 32), use_grn=True, ls_init_value=None, drop_path_rate=0.1
    )


def timm_vit() -> nn.Module:
    return TimmViT(32, 8, num_classes=10, embed_dim=32, depth=2, num_heads=4, init_values=0.5, drop_path_rate=0.1)


def timm_swin() -> nn.Module:
    return TimmSwin(32, 4, num_classes=10, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4)


def timm_cait() -> nn.Module:
    return Cait(32, 8, num_classes=10, embed_dim=32, depth=2, num_heads=4, depth_token_only=2, init_values=0.5)


def transformer_encoder(norm_first: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True, norm_first=norm_first)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    return make


LAYER_NORM = ("layer_norm",)
TIMM_ATTENTION = "x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))"
TIMM_MLP = "x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))"
TIMM_CONVNEXT = "x = self.drop_path(x) + self.shortcut(shortcut)"
PLUS = "hidden_states = residual + hidden_states"

ZOO: dict[str, Entry] = {
    "nanogpt": Entry(
        lambda: GPT(GPTConfig()), lambda b: ((ids(b),), {}), (4,), {"x = x + self.attn(self.ln_1(x))": 2, "x = x + self.mlp(self.ln_2(x))": 2},
        longer=lambda b: ((ids(b, 11),), {}), small=True,
    ),
    "gpt2": Entry(
        causal("gpt2", vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2), tokens(8), (4,),
        {"hidden_states = attn_output + residual": 2, "hidden_states = residual + feed_forward_hidden_states": 2}, longer=tokens(11),
    ),
    "llama": Entry(causal("llama", **DECODER), tokens(8), (4,), {PLUS: 4}, longer=tokens(11), small=True),
    "qwen3": Entry(causal("qwen3", **DECODER), tokens(8), (4,), {PLUS: 4}, longer=tokens(11)),
    "gemma2": Entry(causal("gemma2", **DECODER), tokens(8), (4,), {PLUS: 4}, longer=tokens(11)),
    "gpt_neox": Entry(
        causal("gpt_neox", **ENCODER, use_parallel_residual=True), tokens(8), (2,), {"hidden_states = mlp_output + attn_output + hidden_states": 2},
        branches=4, longer=tokens(11),
    ),
    "falcon": Entry(
        causal(
            "falcon", vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, parallel_attn=True, new_decoder_architecture=False,
            multi_query=True, initializer_range=0.2,
        ),
        tokens(8), (2,), {"out = residual + out": 2}, branches=4, longer=tokens(11),
    ),
    "mixtral": Entry(causal("mixtral", **DECODER, num_local_experts=4, num_experts_per_tok=2), tokens(8), (4,), {PLUS: 4}, longer=tokens(11)),
    "mamba": Entry(
        causal("mamba", vocab_size=99, hidden_size=32, state_size=4, num_hidden_layers=3, time_step_rank=4, initializer_range=0.2), tokens(8), (3,),
        {PLUS: 3}, longer=tokens(11),
    ),
    "bert": Entry(
        base("bert", **ENCODER), masked(8), (4,), {"hidden_states = self.LayerNorm(hidden_states + input_tensor)": 4}, transition=LAYER_NORM,
        longer=masked(11), small=True,
    ),
    "albert": Entry(
        base("albert", vocab_size=99, embedding_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
             max_position_embeddings=64, initializer_range=0.2),
        masked(8), (6,),
        {"attn_output = self.LayerNorm(hidden_states + attn_output)": 3,
         "hidden_states = self.full_layer_layer_norm(ffn_output + attention_output)": 3},
        loops=((3, 2),), transition=LAYER_NORM, longer=masked(11),
    ),
    "vit": Entry(
        base("vit", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8, initializer_range=0.2),
        pixels, (4,), {"hidden_states = hidden_states + residual": 4},
    ),
    "t5": Entry(
        t5, two_sequences(0), (4, 6),
        {"attention_output = hidden_states + self.dropout(attention_output)": 4, "layer_output = hidden_states + self.dropout(attention_output)": 2,
         "hidden_states = hidden_states + self.dropout(forwarded_states)": 4},
        longer=two_sequences(3),
    ),
    "torchvision_resnet18": Entry(lambda: torchvision.models.resnet18(num_classes=10), image(64), (2, 1, 1, 1), {"out += identity": 5}, transition=("relu",)),
    "torchvision_vit": Entry(torchvision_vit, image(32), (4,), {"x = x + input": 2, "return x + y": 2}),
    "torchvision_swin": Entry(
        torchvision_swin, image(32), (4, 4),
        {"x = x + self.stochastic_depth(self.attn(self.norm1(x)))": 4, "x = x + self.stochastic_depth(self.mlp(self.norm2(x)))": 4},
    ),
    "torchvision_convnext": Entry(torchvision_convnext, image(32), (2, 2), {"result += input": 4}, small=True),
    "torchvision_efficientnet_b0": Entry(lambda: torchvision.models.efficientnet_b0(num_classes=10), image(64), (1, 1, 2, 2, 3), {"result += input": 9}),
    "timm_vit": Entry(timm_vit, image(32), (4,), {TIMM_ATTENTION: 2, TIMM_MLP: 2}),
    "timm_test_vit": Entry(lambda: timm.create_model("test_vit", num_classes=10), image(160), (12,), {TIMM_ATTENTION: 6, TIMM_MLP: 6}),
    "timm_swin": Entry(
        timm_swin, image(32), (4, 4), {"x = x + self.drop_path1(self._attn(self.norm1(x)))": 4, "x = x + self.drop_path2(self.mlp(self.norm2(x)))": 4}
    ),
    "timm_cait": Entry(
        timm_cait, image(32), (4, 4),
        {"x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x)))": 2, "x = x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))": 2,
         "x_cls = x_cls + self.drop_path(self.gamma_1 * self.attn(self.norm1(u)))": 2,
         "x_cls = x_cls + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x_cls)))": 2},
    ),
    "timm_test_convnext": Entry(lambda: timm.create_model("test_convnext", num_classes=10, ls_init_value=0.5), image(64), (1, 2, 4, 2), {TIMM_CONVNEXT: 9}),
    "timm_convnext_v2": Entry(timm_convnext_v2, image(64), (1, 1, 2, 1), {TIMM_CONVNEXT: 5}),
    "transformer_encoder": Entry(transformer_encoder(False), features(6), (4,), {"": 4}, transition=LAYER_NORM, longer=features(9)),
    "transformer_encoder_pre": Entry(transformer_encoder(True), features(6), (4,), {"": 4}, longer=features(9)),
}  # fmt: skip

# Height and width stay open through the padding and the window arithmetic: a capture takes a minute.
SLOW_TO_CAPTURE = {"torchvision_swin"}
