"""Updates that come back from another resolution: the merges of a U-Net, told from residual updates.

`fine + up(f(down(fine)))` has the form `x + f(x)`, and so has a block whose attention works on a smaller image. They differ
in what lies on the way and around: a merge goes round whole streams of the coarser level, or stands alone in its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.fx import Graph, Node

from resfx.patterns import dialect
from resfx.patterns.dialect import data_inputs, op_name
from resfx.patterns.facts import Facts
from resfx.patterns.streams import Term

_ENLARGING = frozenset(
    "interpolate upsample upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d conv_transpose1d conv_transpose2d conv_transpose3d pixel_shuffle "
    "repeat_interleave max_unpool1d max_unpool2d max_unpool3d".split()
)


class Resolution:
    """The operations of one graph that make an image or a sequence larger."""

    def __init__(self, graph: Graph, facts: Facts) -> None:
        self._facts = facts
        self._enlarging = {node for node in graph.nodes if _enlarges(node)}

    def comes_back(self, terms: Iterable[Term], carrier: Node) -> bool:
        """Does every way from `carrier` to the terms lead through an enlargement? One that made the carrier lies on none."""
        return bool(self._enlarging) and carrier not in self.way(terms, carrier, self._enlarging - {carrier})

    def way(self, terms: Iterable[Term], carrier: Node, stop: Iterable[Node] = ()) -> set[Node]:
        """The nodes from `carrier` to the terms, both included, on the ways that cross no node of `stop`."""
        seen = set(stop)
        todo = [o for term in terms for o in term.operands if self._facts.depends(o, carrier)]
        found: set[Node] = set()
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            found.add(node)
            if node is not carrier:
                todo.extend(i for i in data_inputs(node) if self._facts.depends(i, carrier))
        return found


def _enlarges(node: Node) -> bool:
    """A transposed convolution of stride one is none: a size besides batch and channels must change."""
    if op_name(node) not in _ENLARGING or not node.all_input_nodes:
        return False
    before, after = dialect.shape_of(node.all_input_nodes[0]), dialect.shape_of(node)
    if before is None or after is None:
        return True
    first = 1 if op_name(node) == "repeat_interleave" else 2  # the rest works on [batch, channels, *sizes]
    return [str(size) for size in before[first:]] != [str(size) for size in after[first:]]
