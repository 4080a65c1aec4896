"""What else a user does with an attached model: keeping it, measuring it, and what it is told where a tool needs a graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import live_toys
import pytest
import torch
from live_helpers import assert_close, perturb
from live_transformers import DECODERS, tokens
from torch import nn

import resfx

FORM = resfx.DeltaAttention()


def attached(form: resfx.Form = FORM, **options: Any) -> live_toys.Model:
    model = live_toys.model()
    resfx.attach(model, form, (live_toys.inputs(),), backend="eager", **options)
    perturb(model)
    return model


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_is_kept_in_a_file(assign: bool, tmp_path: Path) -> None:
    x = live_toys.inputs()
    first = attached()
    torch.save(first.state_dict(), tmp_path / "state.pt")
    fresh = live_toys.model()
    resfx.attach(fresh, FORM, (x,), backend="eager")
    fresh(x)  # what it compiled for its first numbers has no use for them
    fresh.load_state_dict(torch.load(tmp_path / "state.pt"), assign=assign)
    assert_close([fresh(x)], [first(x)])
    fresh(x).sum().backward()
    assert all(p.grad is not None for p in fresh.parameters())


def test_a_library_saves_it_and_loads_it(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    example = {"input_ids": tokens()}
    first = DECODERS["llama"]()
    resfx.attach(first, FORM, (), example, backend="eager")
    perturb(first)
    first.save_pretrained(tmp_path)
    second = type(first).from_pretrained(tmp_path)
    resfx.attach(second, FORM, (), example, backend="eager")
    second.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)  # without the tied head
    assert_close([second(**example).logits], [first(**example).logits])


@pytest.mark.parametrize(
    ("form", "options"),
    [(FORM, {}), (resfx.MultiGate(streams=2), {"select": "stack.layers.1*"}), (resfx.ScaledLoop(), {})],
    ids=["delta", "multigate", "scaledloop"],
)
def test_it_is_measured_as_its_static_rewrite(form: resfx.Form, options: dict[str, Any]) -> None:
    x = live_toys.inputs()
    live = attached(form, **options)
    before = live(x)
    static = resfx.rewrite(live_toys.model(), form, (x,), **options)
    static.load_state_dict(live.state_dict())
    found = resfx.measure(live, (x,), loss=torch.sum)
    assert str(found) == str(resfx.measure(static, (x,), loss=torch.sum))
    assert any(reading.gradient_norm for reading in found.sites)
    assert all(p.grad is None for p in live.parameters())
    assert torch.equal(live(x), before)
    assert list(live.state_dict()) == list(static.state_dict())


def test_a_tool_that_fails_leaves_it_attached() -> None:
    live, x = attached(), live_toys.inputs()
    before = live(x)
    with pytest.raises(resfx.MeasureError, match="one element"):
        resfx.measure(live, (x,), loss=lambda output: output)
    assert torch.equal(live(x), before)


def test_what_needs_a_graph_says_what_to_do(tmp_path: Path) -> None:
    live, x = attached(), live_toys.inputs()
    with pytest.raises(resfx.MeasureError, match="its `0`"):
        resfx.measure(nn.Sequential(live), (x,))
    with pytest.raises(resfx.CaptureError, match=r"resfx\.detach"):
        resfx.find(live, (x,))
    with pytest.raises(resfx.NotRewritten, match=r"resfx\.detach"):
        resfx.revert(live)
    resfx.save(resfx.rewrite(live_toys.model(), FORM, (x,)), tmp_path / "folder")
    with pytest.raises(resfx.CheckpointError, match="load_state_dict"):
        resfx.load(live, tmp_path / "folder", (x,))
    live.load_state_dict(resfx.load(live_toys.model(), tmp_path / "folder", (x,)).state_dict())
