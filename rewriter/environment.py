"""What has to be switched off while a model is captured, and put back exactly afterwards, also on failure."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import nn

from resfx.captured import Mode
from resfx.grad_mode import noted_grad_mode
from resfx.traces import whole_stack_traces


@contextlib.contextmanager
def training_mode(model: nn.Module, mode: Mode | None) -> Iterator[None]:
    """Put the whole tree in `mode`; afterwards every submodule has its own flag back."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        if mode is not None:
            _set_mode(model, mode == "train")
        yield
    finally:
        for module, flag in flags:
            module.training = flag


def _set_mode(model: nn.Module, training: bool) -> None:
    """`model.train(training)`; of an exported program, which refuses that since it is the same in both modes, the flags."""
    try:
        model.train(training)
    except NotImplementedError:
        model.training = training
        for child in model.children():
            _set_mode(child, training)


@contextlib.contextmanager
def _own_attributes(model: nn.Module) -> Iterator[None]:
    """Afterwards every submodule has its very attributes again, with what was in them.

    torch.export leaves copies of lists and dicts behind; a module may register a hook, or keep a traced value, in its first call.
    """
    saved = [(module.__dict__, dict(module.__dict__)) for module in model.modules()]
    contents = [
        (table, table.copy())
        for _, before in saved
        for table in before.values()
        if isinstance(table, (dict, list, set))
    ]
    try:
        yield
    finally:
        for attributes, before in saved:
            for name in attributes.keys() - before.keys():
                del attributes[name]
            attributes.update(before)
        for table, inside in contents:
            _refill(table, inside)


def _refill(table: dict[Any, Any] | list[Any] | set[Any], inside: Any) -> None:
    if isinstance(table, list):
        table[:] = inside
        return
    table.clear()
    table.update(inside)


class _PlainAttention:
    """nn.TransformerEncoderLayer and MultiheadAttention fuse a whole layer into one op where gradients are off: not within this.

    torch has one switch for all threads: the first one in turns it off, the last one out puts it back.
    """

    def __init__(self) -> None:
        self._lock, self._inside, self._enabled = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._enabled = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._inside += 1

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.mha.set_fastpath_enabled(self._enabled)


plain_attention = _PlainAttention()


# What runs around the function of a checkpointed region, by the names that torch has had for it.
_AROUND = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")


class _PlainCheckpoint:
    """Stands in for CheckpointFunction: runs the region with gradients on."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def apply(self, function: Callable[..., Any], _preserve_rng_state: bool, *args: Any) -> Any:
        self.seen.append("reentrant")
        return function(*args)


@contextlib.contextmanager
def _plain_checkpoints(seen: list[str]) -> Iterator[None]:
    """Run checkpointed regions plainly: the reentrant kind, and a region in a region, are exported under no_grad otherwise.

    Patches module attributes of torch.utils.checkpoint. Private, but for the first one: what runs around a region's function.
    """
    module: Any = torch.utils.checkpoint

    def around(*_args: Any, **_kwargs: Any) -> Iterator[None]:
        seen.append("non-reentrant")
        yield

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module, "CheckpointFunction", _PlainCheckpoint(seen)))
        for name in _AROUND:
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, around))
        yield


@contextlib.contextmanager
def capturing(model: nn.Module, mode: Mode | None, seen_checkpoints: list[str]) -> Iterator[None]:
    """Everything a capture needs around it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_own_attributes(model))
        stack.enter_context(training_mode(model, mode))
        stack.enter_context(plain_attention)
        stack.enter_context(_plain_checkpoints(seen_checkpoints))
        stack.enter_context(whole_stack_traces())
        stack.enter_context(noted_grad_mode())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        yield
