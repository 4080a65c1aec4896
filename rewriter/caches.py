"""Whether a capture without a key/value cache left one out: an encoder has the switch in its config, and no cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from resfx import libraries
from resfx.captured import Mode
from resfx.environment import capturing
from resfx.export.quiet import quiet_failure
from resfx.export.run import preserved_buffers


def cache_notes(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> list[str]:
    """The note that a model was captured without its cache, where the same call returns one with its switches on.

    Where that call can't be run, the note is given.
    """
    with capturing(model, mode, []), preserved_buffers(model):
        try:
            output = _on_fake_tensors(model, args, kwargs)
        except Exception:  # the model's own code: what it does on fake tensors is up to it
            return [libraries.CACHE_NOTE]
    return [libraries.CACHE_NOTE] if _holds_cache(output) else []


def _on_fake_tensors(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output's structure, at no cost. FakeTensorMode, what torch.export itself runs a model on, has no public name."""
    with quiet_failure(), FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        args, kwargs = pytree.tree_map_only(torch.Tensor, fake.from_tensor, (args, kwargs))
        return model(*args, **kwargs)


def _holds_cache(value: Any) -> bool:
    """Is a cache in the containers of an output, by the word in its class's name?"""
    if any(word in type(value).__name__ for word in libraries.CACHE_CLASS_WORDS):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_cache, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_cache, value))
    if dataclasses.is_dataclass(value):
        return any(map(_holds_cache, _fields(value)))
    return False


def _fields(value: Any) -> Iterable[Any]:
    return (getattr(value, field.name) for field in dataclasses.fields(value))
