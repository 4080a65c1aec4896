"""The cost of a rewrite grows with the number of sites, no faster. Calls are counted, not seconds: they have no noise."""

from __future__ import annotations

import gc
import sys
from types import FrameType

import pytest
import torch
from passes_toys import Toy, capture, stream_of

from resfx.passes import DeltaAttention, Form, MultiGate, Review, apply

DEPTHS = (32, 64, 96)


def calls(layers: int, form: Form) -> int:
    """How many calls, of Python and of built-in functions, the rewrite of a stack takes."""
    model, x = Toy(layers=layers, d=4), torch.randn(2, 3, 4)
    graph_module = capture(model, x)
    stream = stream_of(graph_module)
    count = 0

    def counting(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()  # what it would free meanwhile makes calls of its own
    sys.setprofile(counting)
    try:
        assert apply(graph_module, stream, form)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


@pytest.mark.parametrize(
    "form", [DeltaAttention(granularity="block", blocks=4), MultiGate(), Review()], ids=lambda form: form.name
)
def test_calls_are_linear_in_the_sites(form: Form) -> None:
    calls(8, form)  # fills caches
    small, middle, large = (calls(layers, form) for layers in DEPTHS)
    assert large - middle == pytest.approx(middle - small, rel=0.005)
