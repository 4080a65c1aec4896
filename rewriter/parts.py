"""The last route: a model whose own forward can't be traced is searched part by part, and that forward stays the user's.

A part is a submodule that traces and holds a residual connection, the highest such one. Streams end at its border.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import fx, nn

from resfx.capture import capture
from resfx.capture_errors import CaptureError, GuardError
from resfx.captured import Captured, capture_notes
from resfx.patterns import Searched, Stream, search
from resfx.patterns.rejected import Rejected
from resfx.rewritten import is_attached
from resfx.verify import trial_run

Called: TypeAlias = list[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Part:
    """`first` is the number that its first stream has in the whole model."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    found: Searched
    notes: tuple[str, ...]
    first: int

    @property
    def streams(self) -> list[Stream]:
        """Its streams as those of the whole model."""
        return [replace(stream, index=self.first + stream.index) for stream in self.found.streams]


def parts_of(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], unweighted: bool = False) -> list[Part]:
    """The parts, in the order of the module tree. None where the model does not run, was rewritten by parts, or is attached: its graphs
    are Dynamo's."""
    if any("residual_map" in vars(module) or is_attached(module) for module in model.modules()):
        return []
    calls = _calls(model, args, kwargs)
    parts: list[Part] = []
    untraced: set[tuple[str, type]] = set()  # paths with # for the numbers: layer 7 fails as layer 0 of its class does
    empty: list[str] = []
    for path, module in _candidates(model, calls):
        kind = re.sub(r"\d+", "#", path), type(module)
        if kind in untraced or any(path.startswith(f"{done}.") for done in (*empty, *(p.path for p in parts))):
            continue
        captured = _captured(module, calls[id(module)])
        if captured is None:
            untraced.add(kind)
            continue
        place(captured.graph, path)
        found = search(captured.graph_module, unweighted=unweighted)
        if not found.streams and captured.untraced is None:
            empty.append(path)
        if found.streams:
            first = sum(len(part.found.streams) for part in parts)
            notes = tuple(f"`{path}`: {note}" for note in capture_notes(captured))
            parts.append(Part(path, module, *calls[id(module)][0], found, notes, first))
    return parts


def parts_note(model: nn.Module, paths: Sequence[str], error: CaptureError) -> str:
    """What a map says of a model that was taken by parts."""
    listed = ", ".join(f"`{path}`" for path in paths)
    reason = str(error).splitlines()[0]
    return (
        f"{type(model).__name__} can't be traced as a whole ({reason}); searched part by part: {listed}. Streams end at the border"
        " of a part, and what runs outside of the parts is not searched"
    )


def rejected_in(parts: Sequence[Part]) -> list[Rejected]:
    """The near misses of all parts."""
    return [rejected for part in parts for rejected in part.found.rejected]


def joined(path: str, inner: str) -> str:
    """Where in the whole model `inner` of the part at `path` is; the part itself is called ""."""
    return f"{path}.{inner}" if inner else path


def place(graph: fx.Graph, path: str) -> None:
    """Let the nodes of a part say where in the whole model they come from."""
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (joined(path, inner), kind) for key, (inner, kind) in stack.items()}


def _calls(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, Called]:
    """What every submodule is called with in one run, by its id."""
    found: dict[int, Called] = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        found.setdefault(id(module), []).append((args, kwargs))

    with contextlib.ExitStack() as stack:
        for module in list(model.modules())[1:]:
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        try:
            trial_run(model, args, kwargs)
        except Exception:
            return {}
    return found


def _candidates(model: nn.Module, calls: Mapping[int, Called]) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that are called and have something to learn, outer ones first."""
    for path, module in list(model.named_modules())[1:]:
        if id(module) in calls and next(module.parameters(), None) is not None:
            yield path, module


def _captured(module: nn.Module, calls: Called) -> Captured | None:
    """One capture that takes every call, or None."""
    try:
        captured = capture(module, *calls[0])
        for args, kwargs in calls:
            captured.signature.inputs(captured.signature.bind(args, kwargs))
    except (CaptureError, GuardError, TypeError):
        return None
    return captured
