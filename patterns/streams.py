"""What a residual stream is, as data: sites, the events between them, and who reads the state.

The search fills these; the passes consume them. All nodes belong to one flat `fx.Graph`.
A stream is a chain of state values of one shape: `entry`, then one value per event. Every event has the state
`before` it and the state `after` it; `events[0].before is entry` and `events[i].after is events[i + 1].before`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch.fx import Node

Kind: TypeAlias = Literal["plain", "scaled", "slice", "coupling"]
Role: TypeAlias = Literal["branch", "tap", "shape"]


@dataclass(frozen=True)
class Term:
    """One non-skip term of a sum: `scale * op(*operands)`.

    `op` is "value" (one operand), "mul" or "div" (elementwise), "mm" or "bmm" (the product inside addcmul, addcdiv,
    addmm, baddbmm).
    """

    op: Literal["value", "mul", "div", "mm", "bmm"]
    operands: tuple[Node, ...]
    scale: float | Node = 1.0


@dataclass(eq=False)
class Site:
    """One residual update `h + u`, once per execution.

    `node` is the add that completes it, `result` the state after it (the same node, except for a site on a slice, where
    `result` is the value that holds the whole state again). `skip` is the operand that carries the state. `terms` is
    the whole non-skip side of the add; `branches` are the terms that are computed from the state, as (first) nodes.
    `region` lists, for a site on a slice, the slice nodes from the whole state to `skip`, outermost first.
    """

    node: Node
    result: Node
    skip: Node
    terms: tuple[Term, ...]
    branches: tuple[Node, ...]
    params: frozenset[str]  # names of the Parameters its branches use: equal sets mean one tied branch
    kind: Kind = "plain"
    skip_scale: float | Node = 1.0  # the sum adds `skip_scale * skip` (beta of addmm, the sign in `f(x) - x`)
    region: tuple[Node, ...] = ()
    path: str = ""  # module path of the completing add, "" for the root
    source: str = ""  # file:line of its innermost frame outside the torch package
    transition: tuple[str, ...] = ()  # canonical op names of N_l, empty in pre-norm models
    shape: tuple[object, ...] = ()
    index: int = 0  # execution order in its stream, over all sites, from 0
    refused: str | None = None  # why it can't be rewritten
    # Loops: how many times one forward pass runs this branch (N), and its number among the stream's distinct branches.
    repeats: int = 1
    branch_id: int = 0

    @property
    def rewritable(self) -> bool:
        return self.refused is None


@dataclass(frozen=True)
class Write:
    """after = before + u."""

    before: Node
    after: Node
    site: Site


@dataclass(frozen=True)
class Scale:
    """after = before * factor, or before / factor."""

    before: Node
    after: Node
    factor: float | Node
    divide: bool = False


@dataclass(frozen=True)
class Side:
    """after = before + sum(terms): terms that are no site (an injection, a step embedding).

    `region`, as a site's: the part of the state that the terms are added to, where it is not the whole.
    """

    before: Node
    after: Node
    terms: tuple[Term, ...]
    region: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Transition:
    """after = N(before): a norm or activation on the stream itself. `nodes` in order; the last one is `after`.

    A torch.cond on the stream is one too: then `sites` are the sites inside it, none of which can be rewritten.
    """

    before: Node
    after: Node
    nodes: tuple[Node, ...]
    sites: tuple[Site, ...] = ()


@dataclass(frozen=True)
class Layout:
    """after = a view, reshape, permute or transpose of before: the same numbers, another layout."""

    before: Node
    after: Node


@dataclass(frozen=True)
class Cast:
    """after = before in another dtype, or a copy of it (clone, contiguous, detach), or dropout on the state.

    Or what a slice takes out again of a value that the state was joined into.
    """

    before: Node
    after: Node


Event: TypeAlias = Write | Scale | Side | Transition | Layout | Cast


@dataclass(frozen=True)
class Reader:
    """`user` takes the state value `state` as an argument, or a part of it that an update of a part takes out (`taken_out`).

    "branch": the input of the next site's branch (`site` is that site's index). "tap": any other reader: it gets `end()` taken
    at that point. "shape": reads sizes, dtype or device only.
    """

    user: Node
    state: Node
    role: Role
    site: int | None = None


@dataclass(eq=False)
class Stream:
    """A maximal chain of sites of unchanged shape."""

    index: int
    entry: Node
    events: tuple[Event, ...]
    readers: tuple[Reader, ...]
    axis: int | None  # feature axis D in the entry's layout (negative: from the end); None where it can't be told
    shape: tuple[object, ...] = ()
    refused: str | None = None  # why no form can take it
    notes: list[str] = field(default_factory=list)

    @property
    def sites(self) -> list[Site]:
        found: list[Site] = []
        for event in self.events:
            if isinstance(event, Write):
                found.append(event.site)
            elif isinstance(event, Transition):
                found.extend(event.sites)
        return found

    @property
    def distinct_branches(self) -> int:
        """L: how many distinct branches (by parameter identity) the stream has."""
        return len({site.branch_id for site in self.sites})
