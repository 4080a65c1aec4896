"""The repeated streams of one rewrite: whether a body can be cut out, how often what lies in it runs, and the cutting itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Node

from resfx.passes.body import Body, body_of, end_of, reason_to_keep
from resfx.passes.editor import Editor
from resfx.passes.repeat import cut_out, repeat_path
from resfx.passes.walk import Plan
from resfx.patterns.streams import Stream


@dataclass(frozen=True)
class _Cut:
    """A stream that was rewritten and is to be repeated: where its body starts and ends now."""

    plan: Plan
    body: Body  # as it was before any edit
    count: int
    entry: Node
    end: Node


class Loops:
    """Bodies are judged on the untouched graph, before the first edit, and cut out after the last one, inner ones first."""

    def __init__(self, editor: Editor, plans: Sequence[Plan], streams: Sequence[Stream]) -> None:
        self._editor = editor
        self._cuts: list[_Cut] = []
        self._bodies: dict[int, Body] = {}
        self._reasons: dict[int, str | None] = {}
        known = {stream.index: stream for stream in (*streams, *(plan.stream for plan in plans))}
        for plan in plans:
            if plan.form.loop_count is None or plan.stream.refused is not None:
                continue
            stream = plan.stream
            body = body_of(stream.entry, end_of(editor.graph_module, stream))
            self._bodies[stream.index] = body
            self._reasons[stream.index] = reason_to_keep(body, stream, known.values())

    def refuse(self, plan: Plan) -> str | None:
        """Why the stream can't be repeated; None where it can, or needn't."""
        reason = self._reasons.get(plan.stream.index)
        return None if reason is None else f"loops={plan.form.loop_count}: {reason}"

    def runs(self, plan: Plan) -> int:
        """How often the stream is repeated, by its own form and by those of the streams around it."""
        first = plan.stream.events[0].after
        around = [cut.count for cut in self._cuts if first in cut.body.nodes]
        return math.prod(around) * (plan.form.loop_count or 1)

    def add(self, plan: Plan, entry: Node, end: Node) -> None:
        """The stream has been rewritten; it runs from `entry` to `end` now."""
        if plan.form.loop_count is None:
            return
        body = self._bodies[plan.stream.index]
        if body.end is not plan.stream.events[-1].after:
            end = body.end  # what follows the last event stays in the graph as it is
        self._cuts.append(_Cut(plan, body, plan.form.loop_count, entry, end))

    def cut(self, prefix: str) -> bool:
        """Put every body into a submodule of its own; False where there is none."""
        for cut in reversed(self._cuts):
            path = repeat_path(prefix, cut.plan.stream.index)
            cut_out(self._editor, cut.entry, cut.end, path, cut.count)
        return bool(self._cuts)
