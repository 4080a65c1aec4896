"""What `attach` leaves on a model: the known streams, the way from a graph to its rewritten form, and what has run.

An `Attachment` belongs to one model. It can be deep-copied with it (an average of weights does that), and then belongs to the copy.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from resfx.live_breaks import break_line, breaks_so_far, last_break
from resfx.live_known import KnownStream
from resfx.patterns import ResidualMap

Backend: TypeAlias = "str | Callable[..., Any]"

# Their keys are numbers that torch gives to one hook only.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

_numbers = itertools.count()
_sessions = threading.local()


class Attachment:
    """The live rewrite of `model`."""

    def __init__(
        self, model: nn.Module, streams: tuple[KnownStream, ...], backend: Backend, residual_map: ResidualMap
    ) -> None:
        self.model, self.streams, self.backend, self.residual_map = model, streams, backend, residual_map
        torch.compiler.assume_constant_result(is_running)  # type: ignore[no-untyped-call]
        self.key = next(_numbers)
        self.active = True
        self.runs = dict.fromkeys((stream.index for stream in streams), 0)  # how often each stream ran rewritten
        self.broke: str | None = None  # the last graph break, for messages
        self._breaks, self._before = 0, dict(self.runs)  # graph breaks, and runs, before this call
        self.failure: Exception | None = None
        self._slots: tuple[Any, list[tuple[str, dict[str, Any], str]]] = (None, [])
        self._hooks: list[dict[int, Any]] | None = None

    def begin(self) -> None:
        """A call from outside begins."""
        self.failure = None
        self._breaks, self._before = breaks_so_far(), dict(self.runs)

    def by_turn(self) -> list[KnownStream]:
        """The streams, those first that ran least in this call: one stack that runs twice is two streams that look alike."""
        return sorted(self.streams, key=lambda stream: self.runs[stream.index] - self._before[stream.index])

    def note_break(self, reason: Any = None) -> None:
        """Note where and why a graph was broken off, or else the last break of this call, if there was one.

        A module that was attached by itself since is a border too.
        """
        line = break_line(reason) or last_break(self._breaks)
        within = self.attached_within() if line is not None else []
        if within:
            line = (
                f"{line}; module `{within[0]}` was attached by itself, which resfx.detach of that module and"
                " torch._dynamo.reset() take back"
            )
        self.broke = line or self.broke

    def look_around(self) -> None:
        """Note again which modules there are: their hooks are part of `state`. For whenever something is compiled anew."""
        self._hooks = [vars(module)[table] for module in self.model.modules() for table in _HOOKS]

    def may_hold(self, parameters: Iterable[str]) -> bool:
        """Are all Parameters of a known site's branches among these?"""
        given = set(parameters)
        return any(site.params and site.params <= given for stream in self.streams for site in stream.sites)

    def attached_within(self) -> list[str]:
        """The paths of the modules in the model that have an attachment of their own."""
        gates = ((path, vars(module).get("forward")) for path, module in self.model.named_modules())
        owners = [(path, getattr(gate, "attachment", self)) for path, gate in gates]
        return [path for path, owner in owners if owner is not self and owner.active]

    def parameters(self) -> dict[str, torch.Tensor]:
        """The new parameters as they are now, by name: what replaced them (a wrapper, a functional call) included."""
        tree = self.model._modules.get("residual")
        known, slots = self._slots
        if tree is None:
            return {}
        if known is not tree:
            slots = list(_slots(tree))
            self._slots = (tree, slots)
        return {name: table[leaf] for name, table, leaf in slots}

    def state(self) -> tuple[Any, ...]:
        """What compiled graphs assume and Dynamo's guards do not see: of the new parameters, and which hooks there are.

        Dynamo can guard hooks itself, which takes it several times as long, at every call.
        """
        if self._hooks is None:
            self.look_around()
        hooks = [number for table in self._hooks or () for number in table] if any(self._hooks or ()) else []
        return (*hooks, *((p.dtype, p.device, p.requires_grad) for p in self.parameters().values()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Attachment:
        fresh = Attachment.__new__(Attachment)
        memo[id(self)] = fresh
        fresh.__init__(copy.deepcopy(self.model, memo), self.streams, self.backend, self.residual_map)  # type: ignore[misc]
        fresh.active = self.active
        return fresh


def _slots(tree: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
    for path, module in tree.named_modules():
        for leaf in module._parameters:
            yield ".".join(filter(None, ("residual", path, leaf))), module._parameters, leaf


@contextmanager
def running(attachment: Attachment) -> Iterator[None]:
    """Within, this thread runs the compiled model of `attachment`: its own modules call their forward plainly."""
    keys: list[int] = getattr(_sessions, "keys", [])
    _sessions.keys = [*keys, attachment.key]
    try:
        yield
    finally:
        _sessions.keys = keys


def is_running(key: int) -> bool:
    """Is it the compiled model with that key that this thread runs, and none that it calls?

    Dynamo asks while it traces, and need not look inside: the answer is one for all graphs of a model.
    """
    return getattr(_sessions, "keys", [])[-1:] == [key]
