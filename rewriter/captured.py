"""What a capture hands on: the graph, how to call it, and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import fx

from resfx.capture_errors import CaptureError
from resfx.dynamic import Attempt
from resfx.functionalize import Functional
from resfx.signature import CallSignature

Mode: TypeAlias = Literal["train", "eval"]


@dataclass(frozen=True)
class ModuleCall:
    """The `index`-th call (from 0) of the submodule at `path`.

    `args`, `kwargs` and `output` are pytrees: `fx.Node` where a tensor or a symbolic size goes, constants elsewhere.
    """

    path: str
    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def key(self) -> str:
        return f"{self.path}@{self.index}" if self.index else self.path


@dataclass
class Captured:
    """A flat graph on the user's own module tree.

    `graph_module`: placeholders are the flattened tensor inputs, named after the arguments; `get_attr` targets are the
    user's parameter and buffer names. `open_dims` and `fixed_dims` list input dimensions as (argument, axis).
    """

    graph_module: fx.GraphModule
    signature: CallSignature
    mode: Mode
    frontend: str
    calls: list[ModuleCall] = field(default_factory=list)
    open_dims: list[tuple[str, int]] = field(default_factory=list)
    fixed_dims: list[tuple[str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    attempt: Attempt | None = None  # the example and the dynamic shapes that worked
    functional: Functional = field(default_factory=Functional)
    changing: set[int] = field(default_factory=set)  # ids of submodules that are no leaves: see changed_arguments.py
    untraced: CaptureError | None = None  # why some submodules stay eager; what is inside of them is not in the graph

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph


def capture_notes(captured: Captured) -> list[str]:
    """What the capture has to say, the input dimensions that stayed fixed included."""
    if not captured.fixed_dims:
        return list(captured.notes)
    fixed = ", ".join(f"{name}[{axis}]" for name, axis in captured.fixed_dims)
    return [*captured.notes, f"input dimensions fixed by the model: {fixed}"]
