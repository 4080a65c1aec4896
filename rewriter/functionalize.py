"""In-place operations become functional ones, so that a value of the stream stays readable after it was updated.

Every tensor node is a view (possibly the whole) of a base. A write computes the new value of the view, puts it back
into the base, and from there on every read of the base or of one of its views goes to the new value. Parameters and
buffers stay mutated in place. What has no functional counterpart stays in place on a private copy.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import fx

from resfx.capture_errors import CaptureError
from resfx.grad_mode import overwritten, runs_without_gradients, with_gradients
from resfx.twins import fake_result, functional_twin, own_defaults, python_twin, written_arguments
from resfx.views import ViewKey, is_whole, put_back, source_of, view_key

aten = torch.ops.aten


@dataclass
class _View:
    """A node as a path of views below its base; `version` is the base's when the node was computed."""

    base: fx.Node
    nodes: tuple[fx.Node, ...]
    keys: tuple[ViewKey, ...]
    version: int


@dataclass
class Functional:
    """What functionalising did: `writes` maps a new value to the base it updates."""

    writes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    views: dict[fx.Node, _View] = field(default_factory=dict)
    # Per base: the new whole values, in order.
    versions: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    # (base, view, version) -> the node that shows it.
    shown: dict[tuple[fx.Node, tuple[ViewKey, ...], int], fx.Node] = field(default_factory=dict)
    replaced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # A part that was joined into a whole -> the slice of the whole that later readers read.
    rejoined: dict[fx.Node, fx.Node] = field(default_factory=dict)
    # A read that is gone -> the equal one before it.
    merged: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def value_of(self, node: fx.Node, order: dict[fx.Node, int], position: int) -> fx.Node:
        """The node that holds what `node` showed when the program had reached `position` (in `order`)."""
        value = self._written(node, order, position)
        value = self.merged.get(value, value)
        part = self.rejoined.get(value)
        return part if part in order and order[part] < position else value

    def written_to(self, nodes: Collection[fx.Node]) -> set[fx.Node]:
        """What was written to `nodes`: who is given one may be given it then, though nothing that was traced reads it."""
        bases = {self.views[node].base for node in nodes if node in self.views}
        return {value for base in bases for value in self.versions.get(base, ())}

    def _written(self, node: fx.Node, order: dict[fx.Node, int], position: int) -> fx.Node:
        node = self.replaced.get(node, node)
        view = self.views.get(node)
        if view is None:
            return node
        done = [new for new in self.versions.get(view.base, ()) if new in order and order[new] < position]
        if len(done) <= view.version:
            return node
        if not view.keys:
            return done[-1]  # made by a write, not shown by a read: nobody may have read the whole since
        return self.shown.get((view.base, view.keys, len(done)), node)


def functionalize(module: fx.GraphModule) -> Functional:
    """Rewrites `module.graph` in place. Raises CaptureError where a later read could not see a write."""
    worker = _Functionalizer(module)
    worker.run()
    return worker.result


class _Functionalizer:
    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.result = Functional()
        self.views = self.result.views
        self.versions = self.result.versions
        self.shown_of: dict[fx.Node, fx.Node] = {}  # the argument that a view looks into

    def run(self) -> None:
        if not any(written_arguments(node) for node in self.graph.nodes):
            return
        nodes = list(self.graph.nodes)
        # Asked before the arguments move on to newer values, which share no memory with their readers' fake values.
        sources = {node: source_of(node) for node in nodes}
        for node in nodes:
            source = self._now(sources[node], node)
            key = view_key(node, source) if source is not None else ()
            replacements = self._refresh(node) if self.versions else {}
            written = written_arguments(node)
            if written:
                self._write(node, written)
                continue
            if source is not None:
                self.shown_of[node] = replacements.get(source, source)
            self._register(node, source, key)
        self.graph.lint()

    def _now(self, source: fx.Node | None, node: fx.Node) -> fx.Node | None:
        """What `node` looks into, once `source` has got another name."""
        while source in self.result.replaced:
            source = self.result.replaced[source]
        return source if source is None or source in node.all_input_nodes else source_of(node)

    def _register(self, node: fx.Node, source: fx.Node | None = None, key: ViewKey = ()) -> None:
        if source is None or source not in self.views:
            self.views[node] = _View(node, (), (), 0)
            return
        view = self.views[source]
        version = len(self.versions.get(view.base, ()))
        if is_whole(node, source):
            self.views[node] = _View(view.base, view.nodes, view.keys, version)
            return
        keys = (*view.keys, key)
        self.views[node] = _View(view.base, (*view.nodes, node), keys, version)
        self.result.shown.setdefault((view.base, keys, version), node)

    def _refresh(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        """Let `node` read the newest values; returns what replaced what."""
        replacements: dict[fx.Node, fx.Node] = {}
        for argument in node.all_input_nodes:
            view = self.views.get(argument)
            if view is None or view.version == len(self.versions.get(view.base, ())):
                continue
            with self.graph.inserting_before(node):
                replacements[argument] = self._show(view.base, view.nodes, view.keys)
        if replacements:
            node.args = fx.map_arg(node.args, lambda n: replacements.get(n, n))
            node.kwargs = fx.map_arg(node.kwargs, lambda n: replacements.get(n, n))
        return replacements

    def _current(self, base: fx.Node) -> fx.Node:
        history = self.versions.get(base)
        return history[-1] if history else base

    def _show(self, base: fx.Node, nodes: tuple[fx.Node, ...], keys: tuple[ViewKey, ...]) -> fx.Node:
        """The view below the base's newest value; nodes are made at the current insertion point."""
        version = len(self.versions.get(base, ()))
        if not nodes:
            return self._current(base)
        known = self.result.shown.get((base, keys, version))
        if known is not None:
            return known
        parent = self._show(base, nodes[:-1], keys[:-1])
        view = nodes[-1]
        source = self.shown_of[view]
        new = self.graph.node_copy(view, lambda n: parent if n is source else n)
        self.views[new] = _View(base, nodes, keys, version)
        self.shown_of[new] = parent
        self.result.shown[(base, keys, version)] = new
        return new

    def _write(self, node: fx.Node, written: list[fx.Node]) -> None:
        target = written[0]
        view = self.views.get(target)
        if len(written) > 1 or view is None:
            self._keep(node, written)
            return
        if view.base.op == "get_attr":
            # A parameter or buffer (a lifted constant is copied by the graph before it is written).
            if node.target is aten.copy_.default and not node.users:
                self._assign(node, view)
                return
            self.views[node] = _View(view.base, view.nodes, view.keys, 0)
            return
        if isinstance(node.target, torch._ops.OpOverload) and torch.Tag.inplace_view in node.target.tags:
            self._reshape_in_place(node, target)
            return
        if self._copies_itself(node, view):
            self._forward(node, view)
            return
        given = node.args[1] if node.target is aten.copy_.default else None
        with self.graph.inserting_before(node):
            new = self._functional(node, target)
            # Who reads the result of copy_ reads the target, and what is written to it later.
            if new is not None and new is given and node.users:
                new = self._copy_of(new, node)
            whole = new if new is None else self._put_back(view, new)
        if new is None or whole is None:
            self._keep(node, written)
            return
        if runs_without_gradients(node) and not runs_without_gradients(view.base):
            new = whole = self._overwritten(node, view.base, whole)
            view = _View(view.base, (), (), view.version)
        self.versions.setdefault(view.base, []).append(whole)
        version = len(self.versions[view.base])
        self.result.shown[(view.base, view.keys, version)] = new
        # A value that copy_ was given stays itself: it is no view of what it was copied into.
        if whole is not given:
            self.views[whole] = _View(view.base, (), (), version)
        if new is not given:
            self.views[new] = _View(view.base, view.nodes, view.keys, version)
        self.result.writes[new] = view.base
        self._forward(node, self.views[written[0]])
        if view.base.op == "placeholder":
            self._note(f"the model writes to its input `{view.base.name}` in place; the captured model leaves it alone")

    def _overwritten(self, node: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
        """A write without gradients: the numbers are new, the gradient is the old value's."""
        with self.graph.inserting_before(node):
            new = self.graph.call_function(overwritten, (self._current(base), value))
        self._fill_meta(new, node)
        new.meta = with_gradients(new.meta)
        return new

    def _forward(self, node: fx.Node, view: _View) -> None:
        """Readers of the in-place node read the view it wrote to."""
        with self.graph.inserting_before(node):
            shown = self._show(view.base, view.nodes, view.keys)
        node.replace_all_uses_with(shown)
        self.result.replaced[node] = shown
        self.graph.erase_node(node)

    def _assign(self, node: fx.Node, view: _View) -> None:
        """`self.count = value` arrives as a copy_ at the end: who read the old tensor, the backward included, keeps it."""
        if self._copies_itself(node, view):  # self.count += 1
            self.graph.erase_node(node)
            return
        order = {other: i for i, other in enumerate(self.graph.nodes)}
        for shown in [other for other, seen in self.views.items() if seen.base is view.base]:
            for reader in list(shown.users):
                if reader is node or shown in written_arguments(reader) or source_of(reader) is shown:
                    continue
                with self.graph.inserting_before(min(reader, node, key=order.__getitem__)):
                    clone = self._copy_of(shown, reader)
                reader.replace_input_with(shown, clone)

    def _copies_itself(self, node: fx.Node, view: _View) -> bool:
        """`x[:, :1] += f` ends in `x[:, :1] = <that very slice>`."""
        if node.target is not aten.copy_.default:
            return False
        source = self.views.get(node.args[1])  # type: ignore[arg-type]
        return source is not None and source.base is view.base and source.keys == view.keys

    def _put_back(self, view: _View, value: fx.Node) -> fx.Node | None:
        for depth in range(len(view.nodes), 0, -1):
            node = view.nodes[depth - 1]
            if isinstance(node.meta.get("val"), (list, tuple)):
                continue  # the split itself; its getitem knows how to put a part back
            above = depth - 1
            while above and isinstance(view.nodes[above - 1].meta.get("val"), (list, tuple)):
                above -= 1
            parent = self._show(view.base, view.nodes[:above], view.keys[:above])
            result = put_back(self.graph, node, parent, value)
            if result is None:
                return None
            self._fill_meta(result, node)
            value = result
        return value

    def _functional(self, node: fx.Node, target: fx.Node) -> fx.Node | None:
        """The value that the in-place `node` writes, or None."""
        if "val" not in target.meta:
            return None
        made = self._copy_value(node, target) if node.target is aten.copy_.default else self._twin(node)
        if made is None:
            return None
        wanted, got = target.meta["val"], made.meta.get("val")
        if isinstance(got, torch.Tensor) and got.dtype != wanted.dtype:
            made = self.graph.call_function(aten.to.dtype, (made, wanted.dtype))
            self._fill_meta(made, node)
        return made

    def _twin(self, node: fx.Node) -> fx.Node | None:
        python = python_twin(node)
        if python is not None:
            op, name, kwargs = python
            new = self.graph.create_node(op, name, node.args, kwargs)
            self._fill_meta(new, node)
            return new
        twin = functional_twin(node.target)
        if twin is None:
            return None
        new = self.graph.call_function(twin, node.args, {**own_defaults(node, twin), **node.kwargs})
        self._fill_meta(new, node)
        return new

    def _copy_value(self, node: fx.Node, target: fx.Node) -> fx.Node | None:
        """`target.copy_(value)`: the value itself, cast and expanded to the target."""
        value = node.args[1]
        if not isinstance(value, fx.Node):
            return None
        wanted, got = target.meta["val"], value.meta["val"]
        if got.dtype != wanted.dtype:
            value = self.graph.call_function(aten.to.dtype, (value, wanted.dtype))
            self._fill_meta(value, node)
        if str(tuple(got.shape)) != str(tuple(wanted.shape)):
            value = self.graph.call_function(aten.expand_as.default, (value, target))
            self._fill_meta(value, node)
        return value

    def _copy_of(self, value: fx.Node, like: fx.Node) -> fx.Node:
        clone = self.graph.call_function(aten.clone.default, (value,))
        self._fill_meta(clone, like)
        return clone

    def _fill_meta(self, new: fx.Node, like: fx.Node) -> None:
        for key in like.meta:
            if key not in ("val", "tensor_meta"):
                new.meta[key] = copy.copy(like.meta[key])
        value = fake_result(new)
        if value is not None:
            new.meta["val"] = value

    def _reshape_in_place(self, node: fx.Node, target: fx.Node) -> None:
        """`x.unsqueeze_(0)`: no memory is written, but this tensor has another shape from here on."""
        twin = functional_twin(node.target)
        if twin is None:
            raise self._failure(node)
        with self.graph.inserting_before(node):
            new = self.graph.call_function(twin, node.args, dict(node.kwargs))
            self._fill_meta(new, node)
        later = set(self._after(node))
        target.replace_all_uses_with(new, delete_user_cb=lambda user: user in later)
        node.replace_all_uses_with(new)
        self.result.replaced[node] = new
        self.shown_of[new] = target
        self._register(new, target, view_key(new, target))
        self.graph.erase_node(node)

    def _after(self, node: fx.Node) -> list[fx.Node]:
        nodes = list(self.graph.nodes)
        return nodes[nodes.index(node) + 1 :]

    def _keep(self, node: fx.Node, written: list[fx.Node]) -> None:
        """No functional twin: stay in place, on a copy where the value is shared with earlier readers."""
        for target in written:
            view = self.views.get(target)
            if view is None or view.base.op == "get_attr":
                continue
            if view.base.op == "placeholder" or self.versions.get(view.base):
                if view.nodes:
                    raise self._failure(node)
                with self.graph.inserting_before(node):
                    clone = self._copy_of(target, target)
                node.replace_input_with(target, clone)
                self.versions.setdefault(view.base, []).append(clone)
                self.views[clone] = _View(view.base, (), (), len(self.versions[view.base]))
            self.result.writes[node] = view.base
            self._note(f"`{node.target}` has no functional form and stays in place")
        # Its result is the tensor that was written.
        self.views[node] = self.views.get(written[0], _View(node, (), (), 0))

    def _failure(self, node: fx.Node) -> CaptureError:
        source = str(node.meta.get("stack_trace", "")).strip().splitlines()
        return CaptureError(
            f"the in-place operation `{node.target}` can't be made functional"
            f"{': ' + ' '.join(source[-2:]) if source else ''}. Write it out of place in the model."
        )

    def _note(self, text: str) -> None:
        if text not in self.result.notes:
            self.result.notes.append(text)


__all__ = ["Functional", "functionalize", "written_arguments"]
