"""What the live mode can't do it says, and what it was not asked to do it doesn't do silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import live_toys
import pytest
import torch
from live_helpers import Pair, assert_close, perturb, worst
from torch import nn

import resfx
from resfx.export import TraceError

FORM = resfx.DeltaAttention()


def attached(breaks: str = "", form: resfx.Form = FORM, **options: Any) -> live_toys.Model:
    torch._dynamo.reset()
    model = live_toys.model(breaks)
    resfx.attach(model, form, (live_toys.inputs(),), backend="eager", **options)
    perturb(model)
    return model


@pytest.mark.parametrize(("breaks", "line"), [("block", "BREAK in a block"), ("between", "BREAK between blocks")])
def test_a_break_within_the_stream_is_named(breaks: str, line: str) -> None:
    model = attached(breaks)
    with pytest.raises(resfx.LiveError) as caught:
        model(live_toys.inputs())
    assert live_toys.line_of(line) in str(caught.value)
    assert "stream 0" in str(caught.value)
    assert "of its 4 sums" in str(caught.value)
    with pytest.raises(resfx.LiveError):  # the next call too: nothing has fallen back
        model(live_toys.inputs())


@pytest.mark.parametrize("breaks", ["outside", "before"])
def test_a_break_outside_of_the_stream_is_harmless(breaks: str) -> None:
    pair = Pair(lambda: live_toys.model(breaks), FORM, (live_toys.inputs(),))
    pair.assert_same(live_toys.inputs())
    pair.assert_same(live_toys.inputs(3, 4))


def test_a_branch_behind_a_break_is_not_missed() -> None:
    """The add then has two inputs of the graph as its terms, and looks like no residual at all."""

    class Apart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.cut = nn.Linear(8, 8), nn.Linear(8, 8), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.a(x)
            if self.cut:
                torch._dynamo.graph_break()
            return x + self.b(y)

    torch._dynamo.reset()
    model = Apart()
    resfx.attach(model, resfx.Review(), (live_toys.inputs(),), backend="eager")
    model(live_toys.inputs())
    model.cut = True
    with pytest.raises(resfx.LiveError, match="break"):
        model(live_toys.inputs())


def test_layers_that_come_and_go() -> None:
    model = attached()
    model(live_toys.inputs())
    model.stack.skip = 1
    with pytest.raises(resfx.LiveError, match="other layers"):
        model(live_toys.inputs())


def test_a_layer_that_was_replaced() -> None:
    model = attached()
    model.stack.layers[1].a = nn.Identity()  # type: ignore[union-attr]
    with pytest.raises(resfx.LiveError, match="no residual update"):
        model(live_toys.inputs())


def test_more_taps_than_the_example_had() -> None:
    model = attached(form=resfx.AttentionResidual())
    with pytest.raises(resfx.LiveError, match=r"residual\.0\.tap0\.query"):
        model(live_toys.inputs(), states=True)


def test_taps_without_parameters_need_no_example() -> None:
    pair = Pair(live_toys.model, resfx.DeltaAttention(), (live_toys.inputs(),))
    live = pair.live(live_toys.inputs(), states=True)
    assert len(live) == 4
    assert_close([live[0]], [pair.static(live_toys.inputs())])


def test_where_dynamo_gives_up_the_call_is_no_plain_one() -> None:
    model = attached()
    plain = live_toys.model()(live_toys.inputs())
    with torch.compiler.set_stance("force_eager"), pytest.raises(resfx.LiveError, match="ran plainly"):
        model(live_toys.inputs())
    assert worst([model(live_toys.inputs())], [plain]) > 1e-3


def test_too_many_recompilations_are_an_error() -> None:
    model = attached()
    with torch._dynamo.config.patch(recompile_limit=2, automatic_dynamic_shapes=False):
        model(live_toys.inputs(2, 2))
        model(live_toys.inputs(2, 3))
        with pytest.raises(resfx.LiveError, match="recompile_limit"):
            model(live_toys.inputs(2, 4))


def test_a_failing_backend_is_an_error_even_where_dynamo_suppresses_it() -> None:
    def failing(graph: torch.fx.GraphModule, example: list[Any]) -> Any:
        raise RuntimeError("no such machine")

    torch._dynamo.reset()
    model = live_toys.model()
    resfx.attach(model, FORM, (live_toys.inputs(),), backend=failing)
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(resfx.LiveError, match="no such machine"):
        model(live_toys.inputs())


def test_what_attach_refuses() -> None:
    model, x = live_toys.model(), live_toys.inputs()
    with pytest.raises(resfx.FormError, match="loops"):
        resfx.attach(model, resfx.ScaledLoop(loops=3), (x,))
    with pytest.raises(resfx.LiveError, match="unknown backend 'indctor'"):
        resfx.attach(model, FORM, (x,), backend="indctor")
    with pytest.raises(resfx.FormError, match="call the class"):
        resfx.attach(model, resfx.DeltaAttention, (x,))  # type: ignore[arg-type]
    with pytest.raises(resfx.LiveError, match="revert"):
        resfx.attach(resfx.rewrite(model, FORM, (x,)), FORM, (x,))
    with pytest.raises(resfx.SelectionError):
        resfx.attach(model, FORM, (x,), streams=[4])
    assert "forward" not in vars(model)
    assert not hasattr(model, "residual")
    resfx.attach(model, FORM, (x,), backend="eager")
    with pytest.raises(resfx.LiveError, match="already"):
        resfx.attach(model, FORM, (x,))
    taken = live_toys.model()
    taken.residual = nn.Linear(2, 2)
    with pytest.raises(resfx.LiveError, match="rename"):
        resfx.attach(taken, FORM, (x,))


def test_selected_sites_only() -> None:
    pair = Pair(live_toys.model, FORM, (live_toys.inputs(),), select="stack.layers.1*")
    pair.assert_same(live_toys.inputs())
    assert {name.split(".")[2] for name in pair.live.state_dict() if name.startswith("residual.")} == {"2", "3"}


def test_an_attached_model_given_to_the_static_mode(tmp_path: Path) -> None:
    model = attached()
    with pytest.raises(resfx.RewriteError, match=r"resfx\.detach"):
        resfx.rewrite(model, FORM, (live_toys.inputs(),))
    with pytest.raises(resfx.NotRewritten, match="state_dict"):
        resfx.save(model, tmp_path / "folder")
    with pytest.raises(TraceError, match=r"use resfx\.rewrite for export[^\n]*$"):
        resfx.export.to_onnx(model, tmp_path / "model.onnx", (live_toys.inputs(),))
