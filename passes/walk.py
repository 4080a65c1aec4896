"""Walks one stream of a graph in execution order and lets a form rewrite it.

The walk keeps the current value of the state beside its original node. Where a form leaves the state plain the original
nodes stay; where it changes, the events that follow are copied onto the new value. Readers are served state by state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from resfx.passes import ops
from resfx.passes.editor import Editor, carrying_path, value_of
from resfx.passes.form import Form
from resfx.passes.layouts import Layouts, read_step
from resfx.passes.marks import Mark, note_of, update_marks
from resfx.passes.masks import share_mask
from resfx.passes.parameters import Parameters, ParameterSpec
from resfx.passes.terms import event_path, has_plain_skip, opaque_nodes, update_of
from resfx.patterns.dialect import data_inputs
from resfx.patterns.event_nodes import taken_out
from resfx.patterns.streams import Event, Layout, Reader, Scale, Side, Site, Stream, Transition, Write

Select = Callable[[Site], bool]


@dataclass(frozen=True)
class Plan:
    """One stream, the form it takes, and which of its sites (None: all)."""

    stream: Stream
    form: Form
    select: Select | None = None
    warm_start: bool = False


class WalkStage:
    """The `Stage` of one stream: emits through the editor and names the parameters."""

    def __init__(self, editor: Editor, plan: Plan, prefix: str, store: Parameters, loops: int = 1) -> None:
        self.stream = plan.stream
        self.warm = plan.warm_start
        self.loops = loops
        self.dim = plan.stream.axis if plan.stream.axis is not None else -1
        self.latest = plan.stream.sites[0]  # the site the walk is at: places what belongs to no site
        self.names: dict[str, None] = {}
        self._editor, self._prefix, self._store, self._tied = editor, prefix, store, plan.form.is_tied

    @property
    def size(self) -> int:
        return int(value_of(self.stream.entry).shape[self.dim])

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        return self._editor.call(function, *args, **kwargs)

    def parameter(self, owner: Site | str, name: str, spec: ParameterSpec) -> Node:
        site = owner if isinstance(owner, Site) else self.latest
        if isinstance(owner, Site):
            owner = str(owner.branch_id if self._tied else owner.index)
        full = f"{self._prefix}.{self.stream.index}.{owner}.{name}"
        self.names[full] = None
        return self._store.node(self._editor, full, spec, site)


class Walk:
    """One pass over the events of a stream.

    `original` is the node that the graph, as it was found, has for the state; `current` is its value now.
    """

    def __init__(
        self, editor: Editor, plan: Plan, chosen: frozenset[int], prefix: str, store: Parameters, loops: int = 1
    ) -> None:
        self.editor, self.stream, self.form, self.chosen = editor, plan.stream, plan.form, chosen
        self.stage = WalkStage(editor, plan, prefix, store, loops)
        self.counts: Counter[str] = Counter()
        self.mixes = plan.warm_start and plan.form.warm_by_mix
        self.layouts = Layouts(editor)
        self.readers = _by_state(plan.stream)
        self.sites = plan.stream.sites
        self.last_write = max(i for i, event in enumerate(plan.stream.events) if isinstance(event, Write))
        self.taps = 0
        # Since the last write: the layouts then, and each stretch of the stream that has followed (with its input).
        self.since_write: tuple[Layouts, list[tuple[Node, list[Node]]]] = (self.layouts, [])

    def run(self) -> None:
        """Rewrite the stream."""
        entry, first = self.stream.entry, self.stream.events[0]
        self.original = self.editor.entry_of(entry, first.after, opaque_nodes(first))
        self.current = self.entry = self.original
        self._place(self.editor.place_after, self.original)
        self.state = self.form.begin(self.stage, self.current)
        self._serve(entry, 0)
        for index, event in enumerate(self.stream.events):
            self._advance(event)
            self._place(self.editor.place_after, event.after)
            self._serve(event.after, index + 1)

    def _place(self, place: Callable[..., None], node: Node) -> None:
        place(node, **self._note(self.stage.latest.index))

    def _note(self, owner: int | str) -> dict[str, Any]:
        """The provenance of new nodes; `site` is the site's number, "final" or "tap<k>"."""
        return {"form": self.form.to_spec(), "stream": self.stream.index, "site": owner}

    def _mark(self, role: str, site: Site) -> Mark:
        size = None if self.stream.axis is None else value_of(self.stream.entry).shape[self.stream.axis]
        if isinstance(size, torch.SymInt):
            size = (
                size.node.maybe_as_int()
            )  # a plain number, so that the mark survives saving; None where the size is open
        return {"role": role, "stream": self.stream.index, "site": site.index, "size": size}

    # Events.

    def _advance(self, event: Event) -> None:
        if isinstance(event, Write):
            self.stage.latest = event.site
            self._watch(event.site)
        if self.form.merges or self.mixes:
            share_mask(self.editor, event)
        self._place(self.editor.place_before, event.after)
        path = event_path(self.original, event)
        if self.form.keeps_values or self.mixes:
            self._make_functional(event, path)
        written = self._tell(event, path)
        if self.form.merges and not self.mixes:
            self.editor.supersede(path)  # what is read instead runs copies of it
        if written is None:
            value = self._follow(path)
        else:
            value = self._fit(self.layouts.from_entry(written), event.after)
            self.counts["writes"] += 1
            if not self.mixes:
                self.editor.supersede(path)
        if isinstance(event, Layout):
            self._change_layout(event)
        if isinstance(event, Write):
            self.since_write = (self.layouts, [])
        elif not isinstance(event, Scale | Side):
            self.since_write[1].append((self.original, path))
        self.original, self.current = event.after, value

    def _watch(self, site: Site) -> None:
        self.editor.watch(self.current, self._mark("state", site))
        for node, reader, mark in update_marks(site, self._mark("update", site)):
            self.editor.watch(node, mark, reader)

    def _tell(self, event: Event, path: list[Node]) -> Node | None:
        """Tell the form's state; the value it writes, None where the state stays plain."""
        match event:
            case Scale(factor=factor, divide=divide):
                self.state.scale(self._factor_in_entry(factor), divide)
            case Side():
                self.state.side(self._update(event, path))
            case Write(site=site):
                h, u = self._scaled_skip(site), self._update(event, path)
                if site.index in self.chosen:
                    return self.state.write(site, h, u)
                self.state.skip(site, h, u)
        return None

    def _scaled_skip(self, site: Site) -> Node:
        """The state as the sum takes it: times its factor (`f(x) - x`, beta of addmm), like everything kept beside it."""
        h = self.layouts.to_entry(self.current)
        if has_plain_skip(site):
            return h
        factor = self._factor_in_entry(site.skip_scale)
        self.state.scale(factor, False)
        return self.state.scaled(h, factor, False)

    def _factor_in_entry(self, factor: float | Node) -> float | Node:
        """A tensor that scales the state in its current layout, as it scales what is kept in the entry's."""
        if not isinstance(factor, Node) or not self.layouts.steps:
            return factor
        return self.layouts.to_entry(self.editor.call(ops.expand_like, factor, self.current))

    def _update(self, event: Write | Side, path: list[Node]) -> Node:
        return self.layouts.to_entry(update_of(self.editor, event, path, self.original, self.current))

    def _follow(self, path: list[Node]) -> Node:
        """The event's own nodes on the current value."""
        if self.current is self.original:
            return path[-1]
        return self.editor.copy(path, {self.original: self.current}, beside=not self.mixes)

    def _change_layout(self, event: Layout) -> None:
        step = read_step(self.editor.graph_module, self.original, event.after)
        if step is None:
            raise AssertionError(f"{event.after.name}: a layout that legality let through can't be read")
        self.layouts = self.layouts.then(step, self.current)

    def _make_functional(self, event: Event, path: list[Node]) -> None:
        if isinstance(event, Transition):
            return
        for node in path:
            self.editor.make_functional(node)

    # Readers.

    def _serve(self, state: Node, index: int) -> None:
        event = self.stream.events[index] if index < len(self.stream.events) else None
        path = [] if event is None else event_path(self.original, event)
        values: dict[object, Node] = {}
        for reader in [*self.readers[state], *self._unlisted(state, index, path)]:
            self._hand_over(reader.user, state, self._known_value(reader, index, values), path, event)
        for part in [] if event is None else taken_out(event):
            for reader in self.readers[part]:
                self._hand_over_part(reader, part, index, values)

    def _unlisted(self, state: Node, index: int, path: list[Node]) -> list[Reader]:
        """Readers of a later state that the search did not list: taps, such as nodes another stream's rewrite made.

        A reader that nobody reads (an assertion) can only look at sizes and dtype, as do those that take a dtype from it.
        """
        if index == 0:
            return []
        listed = {reader.user for reader in self.readers[state]}
        others = [user for user in state.users if user not in listed and user not in path and not self._is_own(user)]
        taps = {user for user in others if state in data_inputs(user) and (user.users or user.op == "output")}
        return [Reader(user, state, "tap" if user in taps else "shape") for user in others]

    def _is_own(self, node: Node) -> bool:
        return node in self.editor.emitted and note_of(node).get("stream") == self.stream.index

    def _known_value(self, reader: Reader, index: int, values: dict[object, Node]) -> Node:
        """Readers of one role and site get one value: `values` has those that were made at this state."""
        key = (reader.role, reader.site)
        if key not in values:
            values[key] = self._value_for(reader, index)
        return values[key]

    def _value_for(self, reader: Reader, index: int) -> Node:
        if reader.role == "shape":
            return self._any_value()
        if reader.role == "branch":
            return self._branch_value(self.sites[reader.site or 0])
        return self._tap_value(final=index > self.last_write)

    def _branch_value(self, site: Site) -> Node:
        value = self.current
        if site.index in self.chosen:
            self.stage.latest = site
            self.editor.annotate(**self._note(site.index))
            h = self.layouts.to_entry(self.current)
            value = self._read("reads", site, h, self.state.read(site, h))
        self.editor.watch(value, self._mark("read", site))
        return value

    def _tap_value(self, *, final: bool) -> Node:
        known = len(self.stage.names)
        owner = "final" if final else f"tap{self.taps}"
        self.editor.annotate(**self._note(owner))
        h = self.layouts.to_entry(self.current)
        value = self._read("ends", owner, h, self.state.end(owner, h))
        if not final and len(self.stage.names) > known:
            self.taps += 1
        return value

    def _read(self, kind: str, owner: Site | str, h: Node, read: Node) -> Node:
        """A form's read in the current layout, dtype and place of the stream, blended where the start is warm."""
        if self.form.merges:
            value = self._after_transitions(read)
        elif read is h:
            value = self.current
        else:
            value = self.layouts.from_entry(read)
        value = self._fit(value, self.original)
        if value is self.original:
            return value
        if self.mixes:
            warm = self.stage.parameter(owner, "warm", ParameterSpec(()))
            value = self.editor.call(ops.blend, self.original, value, warm)
        if value is not self.current:
            self.counts[kind] += 1
        return value

    def _after_transitions(self, merged: Node) -> Node:
        layouts, stretches = self.since_write
        value = layouts.from_entry(merged)
        for before, path in stretches:
            value = path[-1] if value is before else self.editor.copy(path, {before: value})
        return value

    def _any_value(self) -> Node:
        """A value of the state's shape that is alive anyhow."""
        if not self.form.merges or value_of(self.entry).dtype != value_of(self.original).dtype:
            return self.current
        return self.layouts.from_entry(self.entry)

    def _hand_over(self, user: Node, state: Node, value: Node, path: list[Node], event: Event | None) -> None:
        now = self.editor.input_of(user, state)
        if value is now:
            return
        if user not in path:
            self.editor.replace_input(user, state, value)
            return
        # The user is on the state's own way too (a slice): only what comes before the update is read by a branch.
        update = event.site.node if isinstance(event, Write) else path[-1]
        self.editor.fork(user, now, value, set(path[: path.index(update)]), set(path))

    def _hand_over_part(self, reader: Reader, part: Node, index: int, values: dict[object, Node]) -> None:
        """The same part of what a reader of the whole state gets."""
        value = self._known_value(reader, index, values)
        if value is self.original:
            return
        if (value, part) not in values:
            way = carrying_path(self.original, part, ())
            values[value, part] = self.editor.copy(way, {self.original: value})
        self.editor.replace_input(reader.user, part, values[value, part])

    def _fit(self, value: Node, like: Node) -> Node:
        """No site changes the dtype that the original had there."""
        dtype = value_of(like).dtype
        return value if value_of(value).dtype == dtype else self.editor.call(ops.to_dtype, value, dtype)


def _by_state(stream: Stream) -> dict[Node, list[Reader]]:
    """Branches first, by site: new parameters stand in one order, whatever order a capture gave to the readers of a state."""
    readers: dict[Node, list[Reader]] = defaultdict(list)
    for reader in sorted(stream.readers, key=lambda reader: (reader.role != "branch", reader.site or 0)):
        readers[reader.state].append(reader)
    return readers
