"""Review: a learned gate per channel decides how much of an update enters the state.

    write(l) = h + r * u, r = sigmoid(W [rms(h), rms(u)] + b).

Source: Review Residuals, arXiv 2606.31859, and the author's code.
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
class Review(Form):
    """What a branch writes is multiplied by a learned gate per channel, of the state and of itself.

    `eps`: of the rms in the gate. `tied`: a branch that runs several times (shared weights) has one gate for all of its runs.
    """

    eps: float = 1e-5
    tied: bool = False

    name: ClassVar[str] = "review"
    at_init: ClassVar[AtInit] = "different"

    def __post_init__(self) -> None:
        self.require(self.eps > 0, f"eps={self.eps} must be positive")

    @property
    def warm_by_mix(self) -> bool:
        return False  # the gate is doubled instead: 2 * sigmoid(0) = 1

    def begin(self, stage: Stage, h0: Node) -> StreamState:
        return _Review(self, stage)


class _Review(StreamState):
    def __init__(self, form: Review, stage: Stage) -> None:
        super().__init__(stage)
        self.form = form

    def write(self, site: Site, h: Node, u: Node) -> Node | None:
        stage, d = self.stage, self.stage.size
        weight = stage.parameter(site, "weight", ParameterSpec((d, 2 * d)))
        bias = stage.parameter(site, "bias", ParameterSpec((d,)))
        factor = 2.0 if stage.warm else 1.0
        return stage.call(ops.review_write, h, u, weight, bias, self.form.eps, stage.dim, factor)
