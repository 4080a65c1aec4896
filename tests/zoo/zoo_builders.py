"""The zoo's models: a row of zoo.json becomes a module in eval mode and its example call."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Row: TypeAlias = dict[str, Any]
Example: TypeAlias = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

# What was read from each model's source: sites, branches, streams, file:line -> sites; see README.md beside it.
ZOO: dict[str, Row] = {row["id"]: row for row in json.loads((Path(__file__).parent / "zoo.json").read_text())}

_AUTO = {
    "CausalLM": "AutoModelForCausalLM",
    "Base": "AutoModel",
    "Seq2Seq": "AutoModelForSeq2SeqLM",
    "ImageCls": "AutoModelForImageClassification",
    "MaskedLM": "AutoModelForMaskedLM",
    "CTC": "AutoModelForCTC",
}
# torchvision keeps each kind of model in a module of its own.
_TORCHVISION = {
    "cls": "torchvision.models",
    "seg": "torchvision.models.segmentation",
    "det": "torchvision.models.detection",
    "video": "torchvision.models.video",
    "flow": "torchvision.models.optical_flow",
    "quant": "torchvision.models.quantization",
}


def build(name: str) -> Example:
    """The model (random weights from seed 0), args and kwargs of one row."""
    spec = ZOO[name]["spec"]
    torch.manual_seed(0)
    model: nn.Module = _BUILDERS[spec["library"]](spec).eval().float()
    torch.manual_seed(1)
    args, kwargs = _inputs(spec)
    return model, args, kwargs


def _ids(length: int = 8) -> Tensor:
    return torch.arange(3, 3 + length)[None] % 90 + 3


def _pixels(size: int) -> Tensor:
    return torch.randn(1, 3, size, size)


_INPUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "ids": lambda: {"input_ids": _ids()},
    "ids_nc": lambda: {"input_ids": _ids(), "use_cache": False},
    "s2s": lambda: {"input_ids": _ids(), "decoder_input_ids": _ids(5), "use_cache": False},
    "s2s_nc": lambda: {"input_ids": _ids(), "decoder_input_ids": _ids(5)},
    "img": lambda: {"pixel_values": _pixels(32)},
    "img64": lambda: {"pixel_values": _pixels(64)},
    "img128": lambda: {"pixel_values": _pixels(128)},
    "img224": lambda: {"pixel_values": _pixels(224)},
    "wav": lambda: {"input_values": torch.randn(1, 2000)},
    "clip": lambda: {"input_ids": _ids(), "pixel_values": _pixels(32)},
}


def _inputs(spec: Row) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if spec["library"] == "transformers":
        return (), _INPUTS[spec["inputs"]]()
    size, kind = spec["size"], spec.get("kind")
    if kind == "video":
        return (torch.randn(1, 3, spec.get("frames", 8), size, size),), {}
    if kind == "det":
        return ([torch.randn(3, size, size)],), {}
    if kind == "flow":
        return (_pixels(size), _pixels(size)), {}
    return (_pixels(size),), {}


def _timm(spec: Row) -> nn.Module:
    import timm

    model: nn.Module = timm.create_model(spec["name"], pretrained=False, **spec["kw"])
    return model


def _torchvision(spec: Row) -> nn.Module:
    kind = spec["kind"]
    no_weights = {"weights": None, "weights_backbone": None} if kind in ("seg", "det") else {"weights": None}
    make = getattr(importlib.import_module(_TORCHVISION[kind]), spec["name"])
    model: nn.Module = make(**{**no_weights, **spec["kw"]})
    return model


def _transformers(spec: Row) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    with contextlib.redirect_stderr(io.StringIO()):
        config = _config(spec["model_type"], spec["config"])
        model: nn.Module = _transformers_class(config, spec["cls"])(config)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            # A few tables are left as torch.empty gave them.
            if value.is_floating_point() and value.dim() > 1:
                value.nan_to_num_(0.0, 0.0, 0.0)
    return model


def _config(kind: str, fields: Row) -> Any:
    """`kind` is a config class or a model type; a field may hold a config by either."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    given = {name: _config_field(value) for name, value in fields.items()}
    make = getattr(transformers, kind) if kind.endswith("Config") else CONFIG_MAPPING[kind]
    return make(**given)


def _config_field(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    for key in ("__mt__", "__cls__"):
        if key in value:
            return _config(value[key], {name: field for name, field in value.items() if name != key})
    return value


def _transformers_class(config: Any, name: str) -> Any:
    """`name` is an auto class in short, a class of transformers, or module:class for one that it does not export."""
    import transformers

    if ":" in name:
        module, _, inner = name.partition(":")
        return getattr(importlib.import_module(f"transformers.models.{module}"), inner)
    if name not in _AUTO:
        return getattr(transformers, name)
    found = getattr(transformers, _AUTO[name])._model_mapping[type(config)]
    return found[0] if isinstance(found, (list, tuple)) else found


_BUILDERS: dict[str, Callable[[Row], nn.Module]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "transformers": _transformers,
}
