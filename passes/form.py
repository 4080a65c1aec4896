"""The form protocol: what a residual form is, and what it gets to work with.

A form is a frozen dataclass whose fields are its options. For every stream `begin` makes a `StreamState`, which
`resfx.passes.apply` then calls in execution order. All values the state sees are graph nodes in the layout of the
stream's entry; a state emits calls of `resfx.passes.ops` through its `Stage` and never touches the graph itself.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

import torch
from torch.fx import Node

from resfx.passes import ops
from resfx.passes.editor import value_of
from resfx.passes.errors import FormError
from resfx.passes.parameters import ParameterSpec
from resfx.patterns.streams import Site, Stream

AtInit: TypeAlias = Literal["identical", "scaled", "different"]


class Stage(Protocol):
    """What a form may use while it works on one stream."""

    stream: Stream
    dim: int  # the feature axis of every value, as an index from the front or the end
    warm: bool  # start as the identical function; matters to forms whose `warm_by_mix` is False
    loops: int  # how often the stream is repeated by its form and by those of the streams around it

    @property
    def size(self) -> int:
        """D, the size of the feature axis."""

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Node:
        """Emit a call of a function of `ops`."""

    def parameter(self, owner: Site | str, name: str, spec: ParameterSpec) -> Node:
        """`residual.<stream>.<owner>.<name>`, made at its first use; `owner` is a site, "final", "tap0", .."""


class StreamState:
    """One form on one stream. The defaults are the plain residual."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def read(self, site: Site, h: Node) -> Node:
        """What the branch of `site` receives where the state is `h`."""
        return h

    def write(self, site: Site, h: Node, u: Node) -> Node | None:
        """The state after the update `u`, before the transition. None: the plain `h + u`."""
        return None

    def skip(self, site: Site, h: Node, u: Node) -> None:
        """A site that was not selected: the state becomes the plain `h + u`."""

    def scale(self, factor: float | Node, divide: bool) -> None:
        """The state is multiplied (or divided) by `factor`; do the same to what is kept beside it."""

    def side(self, c: Node) -> None:
        """`c`, which belongs to no site, is added to the state."""

    def end(self, owner: str, h: Node) -> Node:
        """What leaves the stream where the state is `h`: `owner` is "final", or "tap<k>" in mid-stream."""
        return h

    def dtype_beside(self, h: Node, source: Node) -> torch.dtype | None:
        """The dtype of the state where it is not that of `source` (a stream cast on its way), else None."""
        state, own = value_of(h).dtype, value_of(source).dtype
        return None if state == own else state

    def scaled(self, value: Node, factor: float | Node, divide: bool) -> Node:
        """`value * factor`, or `value / factor`."""
        return self.stage.call(ops.divide if divide else ops.scale, value, factor)


@dataclass(frozen=True)
class Form(ABC):
    """Base of every form. Class attributes describe it; the dataclass fields of a subclass are its options."""

    name: ClassVar[str]
    at_init: ClassVar[AtInit]
    needs_axis: ClassVar[bool] = True
    keeps_values: ClassVar[bool] = False  # keeps earlier values: in-place updates of the stream become functional
    merges: ClassVar[bool] = False  # has no state of its own: `read` and `end` build it, transitions follow them

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check names and types of the options before the dataclass takes them. Errors: FormError."""
        known = {f.name: f for f in fields(cls)}
        if len(args) > len(known):
            raise FormError(f"{cls.name}: {len(args)} options given, it has {len(known)}")
        for option, value in (*zip(known, args, strict=False), *options.items()):
            if option not in known:
                raise FormError(
                    f"{cls.name}: unknown option {option!r}; the valid ones: {', '.join(known) or 'it has none'}"
                )
            if not _fits(value, known[option]):
                raise FormError(f"{cls.name}: {option}={value!r} is not of type {known[option].type}")
            if isinstance(value, float) and not math.isfinite(value):
                raise FormError(f"{cls.name}: {option}={value!r} must be finite")
        return super().__new__(cls)

    @abstractmethod
    def begin(self, stage: Stage, h0: Node) -> StreamState:
        """The state of a stream that starts with `h0`."""

    def refuse(self, stream: Stream) -> str | None:
        """Why `stream` can't take this form, beyond what holds for all forms."""
        return None

    @property
    def warm_by_mix(self) -> bool:
        """Whether a warm start blends every read with the plain state; False: the form itself sees to it."""
        return True

    @property
    def loop_count(self) -> int | None:
        """How often the whole stream runs; None: its nodes stay in the graph, to run as often as the model does."""
        return None

    @property
    def is_tied(self) -> bool:
        """Whether executions of one branch share their parameters."""
        return bool(getattr(self, "tied", False))

    def learning_rate_factor(self, stream: Stream) -> float:
        """What the learning rate of the branches of `stream` is multiplied by, so that a rate found elsewhere carries over."""
        return 1.0

    def require(self, condition: bool, message: str) -> None:
        """Refuse a contradictory option. Errors: FormError with the form's name."""
        if not condition:
            raise FormError(f"{self.name}: {message}")

    def require_choice(self, option: str, allowed: tuple[str, ...]) -> None:
        """Refuse a value outside `allowed`, naming the valid set."""
        value = getattr(self, option)
        self.require(value in allowed, f"{option}={value!r} is unknown; it is one of {', '.join(allowed)}")

    def to_spec(self) -> str:
        """The text that `resfx.passes.from_spec` turns back into this form: the name and the options that differ."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        changed = [f"{name}={_text(value)}" for name, value in values.items()]
        return f"{self.name}({', '.join(changed)})" if changed else self.name


_PLAIN: dict[str, tuple[type, ...]] = {"bool": (bool,), "int": (int,), "float": (int, float), "None": (type(None),)}


def _fits(value: object, option: Field[Any]) -> bool:
    """Is `value` of the declared type, where that is a number, a flag or None? Other types are the form's to check."""
    kinds = str(option.type).split(" | ")
    if not all(kind in _PLAIN for kind in kinds):
        return True
    if isinstance(value, bool):  # which Python counts as an int
        return "bool" in kinds
    return any(isinstance(value, _PLAIN[kind]) for kind in kinds)


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
