"""The demo's closing table; the demo itself is run by the README's first command."""

from __future__ import annotations

import pytest

import resfx
from resfx.demo import DemoResult, example


@pytest.mark.parametrize(("difference", "how"), [(1e-7, "compiled"), (None, "eager")])
def test_the_table_says_what_its_times_are(difference: float | None, how: str) -> None:
    model, args = example()
    result = DemoResult(
        found=resfx.find(model, args),
        sites=4,
        rewritten=4,
        parameters_before=1000,
        parameters_added=10,
        difference_at_init=1e-7,
        smallest_effect=0.1,
        compiled="torch.compile" if difference else "left out: no compiler",
        difference_compiled=difference,
        milliseconds_before=1.0,
        milliseconds_after=1.25,
        onnx_bytes=2_000_000,
        onnx_runs=["batch 4, optimisations off"],
        onnx_difference=1e-6,
    )
    times = result.rows()["milliseconds, plain -> rewritten"]
    assert times.startswith(f"1.00 -> 1.25 ({how}, on this CPU;")
    assert "no measure of a real model" in times
