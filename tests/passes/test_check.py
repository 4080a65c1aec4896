"""The checks, and the test helper itself: a rewrite that is deliberately wrong must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from passes_toys import capture, perturb, stream_of
from test_events import build, compare
from torch.fx import Node

from resfx.passes import CheckError, DeltaAttention, Review, apply, ops
from resfx.passes.check import RULES, check
from resfx.passes.editor import Editor, carrying_path
from resfx.passes.errors import EditError
from resfx.passes.form import AtInit, Form, Stage, StreamState
from resfx.passes.parameters import ParameterSpec
from resfx.patterns.streams import Site


@dataclass(frozen=True)
class Broken(Form):
    """A form whose state is given by the test."""

    state: Callable[[Stage], StreamState]

    name: ClassVar[str] = "review"  # the reference it is compared with
    at_init: ClassVar[AtInit] = "different"
    eps: float = 1e-5

    def begin(self, stage: Stage, h0: Node) -> StreamState:
        return self.state(stage)


class Half(StreamState):
    """Reviews every second site only: a plausible slip."""

    def write(self, site: Site, h: Node, u: Node) -> Node | None:
        d = self.stage.size
        weight = self.stage.parameter(site, "weight", ParameterSpec((d, 2 * d)))
        bias = self.stage.parameter(site, "bias", ParameterSpec((d,)))
        first, second = (h, u) if site.index % 2 else (u, h)
        return self.stage.call(ops.review_write, first, second, weight, bias, 1e-5, self.stage.dim)


class Narrow(StreamState):
    def read(self, site: Site, h: Node) -> Node:
        return self.stage.call(_first_column, h)


class Orphan(StreamState):
    def read(self, site: Site, h: Node) -> Node:
        self.stage.parameter(site, "unused", ParameterSpec((3,)))
        return h


def _first_column(h: torch.Tensor) -> torch.Tensor:
    return h[..., :1]


def rewritten(state: Callable[[Stage], StreamState]) -> tuple[object, ...]:
    model, inputs, axis = build("pre")
    graph_module = capture(model, *inputs)
    form = Broken(state)
    apply(graph_module, stream_of(graph_module, axis), form)
    return graph_module, model, form, inputs


def test_the_helper_fails_a_wrong_rewrite() -> None:
    graph_module, model, form, inputs = rewritten(Half)
    perturb(graph_module)
    with pytest.raises(AssertionError):
        compare(graph_module, model, form, inputs)


def test_the_helper_fails_a_right_rewrite_with_a_wrong_reader() -> None:
    """One branch still reads the old state: shapes and parameters are all right, the numbers are not."""
    model, inputs, axis = build("pre")
    graph_module = capture(model, *inputs)
    apply(graph_module, stream_of(graph_module, axis), DeltaAttention())
    read = next(n for n in graph_module.graph.nodes if n.target is ops.delta_read)
    read.replace_all_uses_with(read.args[0])
    graph_module.recompile()
    with pytest.raises(AssertionError):
        compare(graph_module, model, DeltaAttention(), inputs)


def test_a_read_of_another_shape() -> None:
    with pytest.raises(CheckError) as caught:
        rewritten(Narrow)
    assert caught.value.rule == "same_inputs"
    assert "_first_column" in str(caught.value)
    assert "read shape" in str(caught.value)


def test_a_parameter_nothing_depends_on() -> None:
    with pytest.raises(CheckError) as caught:
        rewritten(Orphan)
    assert (caught.value.rule, caught.value.node) == ("parameters_used", "residual.0.0.unused")


def edited() -> tuple[Editor, Node]:
    model, inputs, _ = build("pre")
    editor = Editor(capture(model, *inputs))
    add = next(n for n in editor.graph.nodes if n.name == "add")
    editor.place_after(add)
    return editor, add


def test_a_use_before_the_definition() -> None:
    editor, add = edited()
    later = next(n for n in editor.graph.nodes if n.name == "add_2")
    add.args = (later, add.args[1])
    with pytest.raises(CheckError) as caught:
        check(editor, ())
    assert caught.value.rule == "well_formed"


def test_a_changed_dtype() -> None:
    editor, add = edited()
    user = next(iter(add.users))
    editor.replace_input(user, add, editor.call(ops.to_dtype, add, torch.float32))
    with pytest.raises(CheckError, match=r"read torch.float64, now torch.float32") as caught:
        check(editor, ())
    assert caught.value.rule == "same_inputs"


def test_a_lost_value_and_a_dead_node() -> None:
    editor, add = edited()
    node = editor.call(ops.scale, add, 2.0)
    with pytest.raises(CheckError, match="nothing reads it") as caught:
        check(editor, ())
    assert (caught.value.rule, caught.value.node) == ("nothing_dead", node.name)
    del node.meta["val"]
    with pytest.raises(CheckError) as caught:
        check(editor, ())
    assert caught.value.rule == "values_kept"


def test_every_rule_is_seen_to_fail_here() -> None:
    text = Path(__file__).read_text()
    assert all(f'"{rule.__name__}"' in text for rule in RULES)


def test_finish_erases_what_died() -> None:
    editor, add = edited()
    node = editor.call(ops.scale, add, 2.0)
    before = len(editor.graph.nodes)
    editor.erase_dead()
    assert len(editor.graph.nodes) == before - 1
    assert node not in editor.emitted
    check(editor, ())


def test_a_stream_that_does_not_lead_there() -> None:
    editor, add = edited()
    entry = next(n for n in editor.graph.nodes if n.op == "placeholder" and n.target == "c")
    with pytest.raises(EditError, match="does not lead from c to add"):
        carrying_path(entry, add, ())


def test_a_graph_without_example_values() -> None:
    model, inputs, axis = build("pre")
    graph_module = capture(model, *inputs)
    stream = stream_of(graph_module, axis)
    del stream.entry.meta["val"]
    with pytest.raises(EditError, match="has no example value"):
        apply(graph_module, stream, Review())
