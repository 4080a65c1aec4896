"""Tiny random models and their example inputs, for the table in models_zoo.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import transformers
from timm.models.cait import Cait
from timm.models.convnext import ConvNeXt as TimmConvNeXt
from timm.models.swin_transformer import SwinTransformer as TimmSwin
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Inputs: TypeAlias = Callable[[int], Arguments]  # by batch size


def ids(batch: int, length: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (batch, length), generator=generator)


def image(size: int) -> Inputs:
    def inputs(batch: int) -> Arguments:
        return (torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1)),), {}

    return inputs


def named(name: str, length: int) -> Inputs:
    return lambda batch: ((), {name: ids(batch, length)})


def tokens(length: int) -> Inputs:
    return named("input_ids", length)


def features(length: int) -> Inputs:
    return lambda batch: ((torch.randn(batch, length, 16, generator=torch.Generator().manual_seed(1)),), {})


def pixels(batch: int) -> Arguments:
    args, _ = image(32)(batch)
    return (), {"pixel_values": args[0]}


def masked(length: int) -> Inputs:
    """Token ids and a mask that hides the end of the last row."""

    def inputs(batch: int) -> Arguments:
        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[-1, -2:] = 0
        return (), {"input_ids": ids(batch, length), "attention_mask": mask}

    return inputs


def two_sequences(longer: int) -> Inputs:
    return lambda batch: (
        (),
        {"input_ids": ids(batch, 8 + longer), "decoder_input_ids": ids(batch, 5 + longer, seed=2)},
    )


# A wide start, see Entry.build.
DECODER = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
ENCODER = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def causal(config: str, **options: Any) -> Callable[[], nn.Module]:
    """A transformers decoder with its default settings, the cache on."""
    return lambda: transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(config, **options))


def base(config: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: transformers.AutoModel.from_config(transformers.AutoConfig.for_model(config, **options))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=99,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
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
