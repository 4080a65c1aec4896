"""AttentionResidual: there is no running state; every branch reads an attention-weighted sum of all updates so far.

    read(l) = N_{l-1}(sum_i a_i v_i) over [h0, u_1 .. u_{l-1}] (full) or [h0, block sums, the open block's sum] (block);
    end() is the same with its own query.

Source: Attention Residuals, arXiv 2603.15031.
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
class AttentionResidual(Form):
    """Defaults are the paper's full form. Options:

    `granularity`: "full", or "block" with `block_size` (sublayers in a block) or `blocks` (how many blocks).
    `query_init_std`: standard deviation of the queries at init. `eps`: of the key norm. `tied`: one set of parameters for
    each distinct branch in place of one per execution.
    """

    granularity: Literal["full", "block"] = "full"
    block_size: int | None = None
    blocks: int | None = None
    query_init_std: float = 0.0
    eps: float = 1e-6
    tied: bool = False

    name: ClassVar[str] = "attention_residual"
    keeps_values: ClassVar[bool] = True
    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.require_choice("granularity", ("full", "block"))
        block_rule.check_options(self.name, self.granularity, self.block_size, self.blocks)
        self.require(self.eps > 0, f"eps={self.eps} must be positive")
        self.require(self.query_init_std >= 0, f"query_init_std={self.query_init_std} must not be negative")

    @property
    def at_init(self) -> AtInit:  # type: ignore[override]
        return "different" if self.query_init_std else "scaled"  # blocks or not: the sources sum to the state

    def refuse(self, stream: Stream) -> str | None:
        return block_rule.refuse(len(stream.sites), self.blocks)

    def begin(self, stage: Stage, h0: Node) -> StreamState:
        return _AttentionResidual(self, stage, h0)


class _AttentionResidual(StreamState):
    """`sources` are h0 and the finished sums; with full granularity every update is a block of its own."""

    def __init__(self, form: AttentionResidual, stage: Stage, h0: Node) -> None:
        super().__init__(stage)
        self.form = form
        sites = len(stage.stream.sites)
        full = form.granularity == "full"
        self.starts = frozenset(range(sites)) if full else block_rule.starts(sites, form.block_size, form.blocks)
        self.sources = [h0]
        self.is_open = False  # whether the last source is a sum that still grows

    def read(self, site: Site, h: Node) -> Node:
        return self._merged(site, h)

    def end(self, owner: str, h: Node) -> Node:
        return self._merged(owner, h)

    def write(self, site: Site, h: Node, u: Node) -> Node | None:
        if self.is_open and site.index not in self.starts:
            self.sources[-1] = self.stage.call(ops.accumulate, self.sources[-1], u, self.sources[0])
        else:
            self.sources.append(u)
        self.is_open = True
        return None

    def skip(self, site: Site, h: Node, u: Node) -> None:
        self.write(site, h, u)

    def scale(self, factor: float | Node, divide: bool) -> None:
        self.sources = [self.scaled(source, factor, divide) for source in self.sources]

    def side(self, c: Node) -> None:
        self.sources[-1] = self.stage.call(ops.accumulate, self.sources[-1], c, self.sources[0])

    def _merged(self, owner: Site | str, h: Node) -> Node:
        stage, form = self.stage, self.form
        if len(self.sources) == 1:  # the one weight is 1 whatever the query is: no parameters
            return self.sources[0]
        query = stage.parameter(owner, "query", ParameterSpec((stage.size,), std=form.query_init_std))
        key_norm = stage.parameter(owner, "key_norm", ParameterSpec((stage.size,), fill=1.0))
        dtype = self.dtype_beside(h, self.sources[0])
        return stage.call(ops.routed_read, list(self.sources), query, key_norm, form.eps, stage.dim, dtype)
