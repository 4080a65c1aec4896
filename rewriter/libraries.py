"""What only one library knows, as data: cache switches, input names, input sizes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

# Config fields that make a model return a cache; the value the capture uses instead.
CACHE_FIELDS = {"use_cache": False}
# Arguments that stand for such a field: constants that mean the same as leaving the argument out.
SAME_AS_DEFAULT: dict[str, tuple[Any, ...]] = {"use_cache": (None, False), "return_dict": (None, True)}
HINTS = {
    "use_cache": "The model was captured without its cache: call it on the whole sequence.",
    "past_key_values": "The model was captured without its cache: call it on the whole sequence.",
}
CACHE_NOTE = "captured with its key/value cache switched off: past_key_values, where the model returns it, is None"
CACHE_CLASS_WORDS = ("Cache",)
# Their own operators that the ONNX exporter does not know: what they mean.
ONNX_FUNCTIONS = {"transformers::grouped_mm_fallback": "resfx.export.onnx_translations:grouped_mm"}

_VISION = 224


def _configs(model: nn.Module) -> list[Any]:
    """Every distinct config object of the tree that has one of the cache switches on."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is None or isinstance(config, dict):
            continue
        if any(getattr(config, name, value) not in (value, None) for name, value in CACHE_FIELDS.items()):
            found[id(config)] = config
    return list(found.values())


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[bool]:
    """Switch the caches of all configs in the tree off; yields whether one was on. The configs come back afterwards."""
    changed: list[tuple[Any, str, Any]] = []
    try:
        for config in _configs(model):
            for name, value in CACHE_FIELDS.items():
                if hasattr(config, name):
                    changed.append((config, name, getattr(config, name)))
                    setattr(config, name, value)
        yield bool(changed)
    finally:
        for config, name, value in changed:
            setattr(config, name, value)


def example_inputs(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """(args, kwargs) from the library's own knowledge of the model, None where there is none."""
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "model_type"):
        return (), _transformers_inputs(model, config)
    timm_config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if isinstance(timm_config, dict) and timm_config.get("input_size"):
        return (torch.randn(2, *timm_config["input_size"]),), {}
    if type(model).__module__.startswith("torchvision."):
        return (torch.randn(2, 3, _VISION, _VISION),), {}
    return None


def _transformers_inputs(model: nn.Module, config: Any) -> dict[str, Any]:
    names = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary: int = getattr(text_config, "vocab_size", None) or getattr(config, "vocab_size", None) or 100
    inputs: dict[str, Any] = {}
    if main == "pixel_values" or "pixel_values" in names:
        size = getattr(config, "image_size", None) or _VISION
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs["pixel_values"] = torch.randn(2, getattr(config, "num_channels", 3), height, width)
    if main == "input_values":
        inputs["input_values"] = torch.randn(2, 4000)
    if main == "input_features":
        bins = getattr(config, "num_mel_bins", 80)
        inputs["input_features"] = torch.randn(2, bins, 2 * getattr(config, "max_source_positions", 1500))
    if main == "input_ids" or ("input_ids" in names and not inputs):
        inputs["input_ids"] = torch.randint(0, vocabulary, (2, 8))
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
        inputs["decoder_input_ids"] = torch.randint(0, vocabulary, (2, 6))
    return inputs
