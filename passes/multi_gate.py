"""MultiGate: several streams, each taking a gated share of every update; the state is a weighted pool of them.

    write(l, u): the first n - 1 updates become streams; from then on s_i <- (1 - b_i) s_i + b_i u.
    h <- N(sum_i p_i s_i).

Source: Multi-Gate Residuals, arXiv 2605.23259.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch.fx import Node

from resfx.passes import ops
from resfx.passes.form import AtInit, Form, Stage, StreamState
from resfx.passes.parameters import ParameterSpec
from resfx.passes.streams_again import streams_again
from resfx.patterns.streams import Site, Stream


@dataclass(frozen=True)
class MultiGate(Form):
    """`streams`: n. `gate`: "independent" (a sigmoid for each stream) or "competitive" (a softmax over the streams and a forget logit).

    `b_base`, `l_base`: the gates' bias at `l_base` mixing writes, scaled to the model's own depth. `eps`: of the norms inside.
    `tied`: one set of parameters for each distinct branch in place of one per execution.
    """

    streams: int = 4
    gate: Literal["independent", "competitive"] = "independent"
    b_base: float = -3.0
    l_base: int = 21
    eps: float = 1e-6
    tied: bool = False

    name: ClassVar[str] = "multi_gate"
    at_init: ClassVar[AtInit] = "different"
    keeps_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require_choice("gate", ("independent", "competitive"))
        self.require(self.streams >= 1, f"streams={self.streams} must be at least 1")
        self.require(self.l_base >= 1, f"l_base={self.l_base} must be at least 1")
        # Far beyond any use: the gate's bias is then about the same size.
        self.require(abs(self.b_base) <= 100, f"b_base={self.b_base} must lie between -100 and 100")
        self.require(self.eps > 0, f"eps={self.eps} must be positive")

    def inverse_gate(self, mixing_writes: int) -> float:
        """1 / b0: the initial gate for so many mixing writes is b0 = 1 / (sqrt(L / l_base) (1 + e^-b_base))."""
        return math.sqrt(mixing_writes / self.l_base) * (1 + math.exp(-self.b_base))

    def refuse(self, stream: Stream) -> str | None:
        sites = len(stream.sites)
        if sites < self.streams:
            return None  # it only pools
        inverse = self.inverse_gate(sites - self.streams + 1)
        if self.gate == "independent" and inverse <= 1:
            return f"with {sites} sites the initial gate would be {1 / inverse:.3f}, 1 or more: lower b_base or l_base"
        if self.gate == "competitive" and inverse <= self.streams:
            fitting = [n for n in range(1, self.streams) if self.inverse_gate(sites - n + 1) > n]
            advice = f"the largest that fits is {max(fitting)}" if fitting else "none fits: lower b_base or l_base"
            return f"it is too shallow for streams={self.streams} competitive gates with {sites} sites; {advice}"
        return None

    def begin(self, stage: Stage, h0: Node) -> StreamState:
        return _MultiGate(self, stage, h0)


class _MultiGate(StreamState):
    def __init__(self, form: MultiGate, stage: Stage, h0: Node) -> None:
        super().__init__(stage)
        self.form = form
        self.streams = [h0]
        self.before: tuple[Any, ...] = ()  # what the mixing write before was given, if that one made no streams again
        self.sites = len(stage.stream.sites)

    def write(self, site: Site, h: Node, u: Node) -> Node | None:
        stage, form = self.stage, self.form
        if len(self.streams) < form.streams:
            self.streams.append(u)
        else:
            self._mix(site, h, u)
        if len(self.streams) == 1:
            return self.streams[0]
        w_alpha = stage.parameter(site, "w_alpha", ParameterSpec((stage.size,)))
        dtype = self.dtype_beside(h, self.streams[0])
        return stage.call(ops.pool, list(self.streams), w_alpha, form.eps, stage.dim, dtype)

    def skip(self, site: Site, h: Node, u: Node) -> None:
        self.side(u)  # the weights sum to 1: the pool moves by u, as the state does

    def scale(self, factor: float | Node, divide: bool) -> None:
        self.before = ()
        self.streams = [self.scaled(stream, factor, divide) for stream in self.streams]

    def side(self, c: Node) -> None:
        self.before = ()
        self.streams = [self.stage.call(ops.accumulate, stream, c, self.streams[0]) for stream in self.streams]

    def _mix(self, site: Site, h: Node, u: Node) -> None:
        stage, form = self.stage, self.form
        n = len(self.streams)
        inverse = form.inverse_gate(self.sites - form.streams + 1)
        w_beta = stage.parameter(site, "w_beta", ParameterSpec((stage.size,)))
        mix: Any = ops.independent_mix
        if form.gate == "independent":
            other = stage.parameter(site, "b_beta", ParameterSpec((n,), fill=-math.log(inverse - 1)))
        else:
            mix = ops.competitive_mix
            other = stage.parameter(site, "forget", ParameterSpec((1,), fill=math.log(inverse - n)))
        streams: Any = list(self.streams)
        update, rest = (u, w_beta, other), (form.eps, stage.dim)
        if self.before:
            streams = stage.call(streams_again, streams, *self.before, u)
        self.before = () if self.before else (form.gate, streams, *update, *rest)
        mixed = stage.call(mix, streams, *update, *rest, self.dtype_beside(h, self.streams[0]))
        self.streams = [stage.call(ops.pick, mixed, index) for index in range(n)]
