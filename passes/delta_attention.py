"""DeltaAttention: every branch reads the state plus a learned, attention-weighted sum of the updates so far.

    read(l) = h + sum_i a_i v_i over [h0, u_1 .. u_{l-1}] (sublayer) or [h0, d_1 .. d_b] (block), write(l) = h + u.

Source: Delta Attention Residuals, arXiv 2605.18855, and the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch.fx import Node

from resfx.passes import blocks as block_rule
from resfx.passes import ops
from resfx.passes.form import AtInit, Form, Stage, StreamState
from resfx.passes.parameters import ParameterSpec
from resfx.patterns.streams import Site, Stream


@dataclass(frozen=True)
class DeltaAttention(Form):
    """Defaults are the paper's sublayer form. Options:

    `granularity`: "sublayer", or "block" with `block_size` (sublayers in a block) or `blocks` (how many blocks).
    `seeded`: the first branch is routed too, over [h0]. `null_source`: one more source per site, a learned vector, zero at init.
    `gate`: how much of the read is taken, (1 - g) h + g read: "none" (all of it), "scalar" (one learned logit), "vector"
    (sigmoid(W h + b)) or "alpha" (one learned factor, zero at init). `official_sources` (block): the published code's own
    block sources, for weights trained with it. `query_init_std`: 0 as in the paper; the published code uses 0.02.
    `eps`: of the key norm. `tied`: one set of parameters for each distinct branch in place of one per execution.
    """

    granularity: Literal["sublayer", "block"] = "sublayer"
    block_size: int | None = None
    blocks: int | None = None
    seeded: bool = False
    null_source: bool = False
    gate: Literal["none", "scalar", "vector", "alpha"] = "none"
    official_sources: bool = False
    query_init_std: float = 0.0
    eps: float = 1e-6
    tied: bool = False

    name: ClassVar[str] = "delta"
    keeps_values: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require_choice("granularity", ("sublayer", "block"))
        self.require_choice("gate", ("none", "scalar", "vector", "alpha"))
        block_rule.check_options(self.name, self.granularity, self.block_size, self.blocks)
        self.require(self.eps > 0, f"eps={self.eps} must be positive")
        self.require(self.query_init_std >= 0, f"query_init_std={self.query_init_std} must not be negative")
        self.require(
            not self.official_sources or self.granularity == "block", "official_sources belongs to granularity=block"
        )
        self.require(
            not (self.official_sources and self.seeded), "official_sources has an unrouted first read: not with seeded"
        )

    @property
    def at_init(self) -> AtInit:  # type: ignore[override]
        if self.gate == "alpha":
            return "identical"
        every_update = self.granularity == "sublayer" or (self.block_size == 1 and not self.official_sources)
        return "scaled" if every_update and not self.query_init_std else "different"

    @property
    def warm_by_mix(self) -> bool:
        return self.gate != "alpha"

    def refuse(self, stream: Stream) -> str | None:
        return block_rule.refuse(len(stream.sites), self.blocks)

    def begin(self, stage: Stage, h0: Node) -> StreamState:
        if self.granularity == "sublayer":
            return _Sublayer(self, stage, h0)
        return _Block(self, stage, h0)


class _Sublayer(StreamState):
    """Sources: h0 and every update."""

    def __init__(self, form: DeltaAttention, stage: Stage, h0: Node) -> None:
        super().__init__(stage)
        self.form = form
        self.sources = [h0]

    def read(self, site: Site, h: Node) -> Node:
        if site.index == 0 and not self.form.seeded:
            return h
        return self._gated(site, h, self._routed(site, h))

    def write(self, site: Site, h: Node, u: Node) -> Node | None:
        self.sources.append(u)
        return None

    def skip(self, site: Site, h: Node, u: Node) -> None:
        self.write(site, h, u)

    def scale(self, factor: float | Node, divide: bool) -> None:
        self.sources = [self.scaled(source, factor, divide) for source in self.sources]

    def _routed(self, site: Site, h: Node) -> Node:
        stage, form = self.stage, self.form
        sources = list(self.sources)
        if form.null_source:
            null = stage.parameter(site, "null", ParameterSpec((stage.size,)))
            sources.append(stage.call(ops.expand_source, null, h, stage.dim))
        if len(sources) == 1:  # the one weight is 1 whatever the query is: no parameters
            return stage.call(ops.single_read, h, sources[0])
        query = stage.parameter(site, "query", ParameterSpec((stage.size,), std=form.query_init_std))
        key_norm = stage.parameter(site, "key_norm", ParameterSpec((stage.size,), fill=1.0))
        return stage.call(ops.delta_read, h, sources, query, key_norm, form.eps, stage.dim)

    def _gated(self, site: Site, h: Node, read: Node) -> Node:
        stage = self.stage
        match self.form.gate:
            case "scalar":
                logit = stage.parameter(site, "gate_logit", ParameterSpec((), fill=-2.0))
                return stage.call(ops.scalar_gate, h, read, logit)
            case "vector":
                weight = stage.parameter(site, "gate_weight", ParameterSpec((stage.size, stage.size)))
                bias = stage.parameter(site, "gate_bias", ParameterSpec((stage.size,), fill=-2.0))
                return stage.call(ops.vector_gate, h, read, weight, bias, stage.dim)
            case "alpha":
                return stage.call(ops.blend, h, read, stage.parameter(site, "alpha", ParameterSpec(())))
            case _:
                return read


class _Block(_Sublayer):
    """Sources: h0 and the change of the state over every finished block."""

    def __init__(self, form: DeltaAttention, stage: Stage, h0: Node) -> None:
        super().__init__(form, stage, h0)
        self.open = block_rule.starts(len(stage.stream.sites), form.block_size, form.blocks)
        self.boundary = h0  # the state where the open block began

    def read(self, site: Site, h: Node) -> Node:
        if not self.form.official_sources:
            self._finish_block(site, h)
        return super().read(site, h)

    def write(self, site: Site, h: Node, u: Node) -> Node | None:
        self._finish_block(site, h)
        return None

    def _routed(self, site: Site, h: Node) -> Node:
        return super()._routed(site, self.stage.call(ops.kept, h))

    def scale(self, factor: float | Node, divide: bool) -> None:
        super().scale(factor, divide)
        self.boundary = self.scaled(self.boundary, factor, divide)

    def _finish_block(self, site: Site, h: Node) -> None:
        """`site` is the first of a block: the one before has ended with the state `h`."""
        if site.index not in self.open:
            return
        self.open -= {site.index}
        # The published code subtracts the last source of its list, not the state where the block began.
        since = self.sources[-1] if self.form.official_sources else self.boundary
        self.sources.append(self.stage.call(ops.subtract, h, since))
        self.boundary = h
