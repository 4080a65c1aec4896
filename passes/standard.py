"""Standard: the plain residual `h <- N(h + u)`, the baseline. The graph stays as it is, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from resfx.passes.form import AtInit, Form, Stage, StreamState


@dataclass(frozen=True)
class Standard(Form):
    """The plain residual."""

    name: ClassVar[str] = "standard"
    at_init: ClassVar[AtInit] = "identical"
    needs_axis: ClassVar[bool] = False

    def begin(self, stage: Stage, h0: Node) -> StreamState:
        return StreamState(stage)
