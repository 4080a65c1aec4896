"""ScaledLoop: updates scaled by how often the pass repeats their branch, and by how many branches there are.

    write(l) = h + e u, e = lam / (N sqrt(L)); N executions of the site's branch, L distinct branches of the stream.

`loops=K` also repeats the whole stream K times with the same weights (see `resfx.passes.repeat`): then N has the factor K.

Source: On the Residual Scaling of Looped Transformers, arXiv 2606.18524.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from torch.fx import Node

from resfx.passes import ops
from resfx.passes.form import AtInit, Form, Stage, StreamState
from resfx.passes.parameters import ParameterSpec
from resfx.patterns.streams import Site, Stream


@dataclass(frozen=True)
class ScaledLoop(Form):
    """`lam`: the factor in e. `loops`: run the whole stream so many times; None: as often as the model does.

    `learnable`: lam becomes one scalar parameter for each distinct branch, starting at `lam`.
    """

    lam: float = 1.0
    loops: int | None = None
    learnable: bool = False

    name: ClassVar[str] = "scaled_loop"
    at_init: ClassVar[AtInit] = "different"
    needs_axis: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.require(self.loops is None or self.loops >= 1, f"loops={self.loops} must be at least 1")

    @property
    def loop_count(self) -> int | None:
        return self.loops

    @property
    def is_tied(self) -> bool:
        return True  # lam belongs to a branch, not to its executions

    @property
    def warm_by_mix(self) -> bool:
        return False  # lam starts at N sqrt(L) instead, so that e = 1

    def learning_rate_factor(self, stream: Stream) -> float:
        """1 / sqrt(L), whatever N is. A step of size r in every branch moves the output by N L e r = lam sqrt(L) r."""
        return 1.0 / math.sqrt(stream.distinct_branches)

    def begin(self, stage: Stage, h0: Node) -> StreamState:
        return _ScaledLoop(self, stage)


class _ScaledLoop(StreamState):
    def __init__(self, form: ScaledLoop, stage: Stage) -> None:
        super().__init__(stage)
        self.form = form
        self.width = math.sqrt(stage.stream.distinct_branches)

    def write(self, site: Site, h: Node, u: Node) -> Node | None:
        divisor = site.repeats * self.width
        if not (self.form.learnable or self.stage.warm):
            return self.stage.call(ops.scaled_write, h, u, self.form.lam / divisor)
        start = divisor * self.stage.loops if self.stage.warm else self.form.lam
        lam = self.stage.parameter(site, "lam", ParameterSpec((), fill=start))
        return self.stage.call(ops.learned_scaled_write, h, u, lam, divisor)
