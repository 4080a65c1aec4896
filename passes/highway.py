"""Highway: a gate computed from the state alone decides how much of an update enters it.

write(l) = h + g * u, or with `convex` (1 - g) h + g u; g = sigmoid(W h + b).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from resfx.passes import ops
from resfx.passes.form import AtInit, Form, Stage, StreamState
from resfx.passes.parameters import ParameterSpec
from resfx.patterns.streams import Site


@dataclass(frozen=True)
class Highway(Form):
    """What a branch writes is multiplied by a learned gate per channel, of the state alone.

    `convex`: the state is multiplied by what the gate leaves. `tied`: a branch that runs several times (shared weights) has one gate for
    all of its runs.
    """

    convex: bool = False
    tied: bool = False

    name: ClassVar[str] = "highway"
    at_init: ClassVar[AtInit] = "different"

    @property
    def warm_by_mix(self) -> bool:
        return False  # additive: the gate is doubled; convex: the written value is blended

    def begin(self, stage: Stage, h0: Node) -> StreamState:
        return _Highway(self, stage)


class _Highway(StreamState):
    def __init__(self, form: Highway, stage: Stage) -> None:
        super().__init__(stage)
        self.form = form

    def write(self, site: Site, h: Node, u: Node) -> Node | None:
        stage, d = self.stage, self.stage.size
        weight = stage.parameter(site, "weight", ParameterSpec((d, d)))
        bias = stage.parameter(site, "bias", ParameterSpec((d,)))
        if not self.form.convex:
            factor = 2.0 if stage.warm else 1.0
            return stage.call(ops.highway_write, h, u, weight, bias, stage.dim, factor)
        value = stage.call(ops.convex_highway_write, h, u, weight, bias, stage.dim)
        if not stage.warm:
            return value
        plain = stage.call(ops.add, [h, u])
        return stage.call(ops.blend, plain, value, stage.parameter(site, "warm", ParameterSpec(())))
