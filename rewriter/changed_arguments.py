"""Submodules that change the list or dict they are given: a call in a graph would change a copy, which nobody reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import nn

from resfx import libraries
from resfx.verify import trial_run

Seen: TypeAlias = list[tuple[Any, list[Any]]]  # containers, and what was in them


def changing_modules(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The ids of the submodules that do so when the model runs once, in eval mode; none where it does not run."""
    found: set[int] = set()
    before: list[Seen] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        before.append([(container, _content(container)) for container in _containers((args, kwargs))])

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if any(not _same(content, _content(container)) for container, content in before.pop()):
            found.add(id(module))

    with contextlib.ExitStack() as stack:
        for module in list(model.modules())[1:]:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        with contextlib.suppress(Exception), libraries.without_cache(model):
            trial_run(model, args, kwargs)
    return found


def _containers(value: Any) -> Iterator[Any]:
    """The lists and dicts in `value`, at any depth."""
    if type(value) in (list, dict):
        yield value
    if type(value) in (list, tuple, dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _content(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
