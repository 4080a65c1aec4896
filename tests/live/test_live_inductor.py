"""The real compiler behind the live mode: numbers, training, and its caches on disk. Minutes, for it compiles C++."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import live_toys
import pytest
import torch
from live_helpers import Pair, perturb
from test_live_training import losses

import resfx

pytestmark = pytest.mark.slow


def test_inductor_as_the_static_rewrite() -> None:
    def make() -> live_toys.Model:
        return live_toys.model().double()

    pair = Pair(make, resfx.DeltaAttention(), (live_toys.inputs().double(),), backend="inductor")
    for batch, length in ((2, 5), (3, 9), (4, 11), (1, 1)):
        pair.assert_same(live_toys.inputs(batch, length).double(), tolerance=1e-9)
    mine, theirs = losses(pair.live.float(), 20), losses(pair.static.float(), 20)
    assert mine == pytest.approx(theirs, rel=1e-4)


def test_what_is_cached_is_told_apart_by_form_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def misses(form: resfx.Form) -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        model = live_toys.model()
        resfx.attach(model, form, (live_toys.inputs(),))
        perturb(model)
        model(
            live_toys.inputs()
        ).sum().backward()  # the forward is kept with its backward, which is compiled when it is needed
        return counters["aot_autograd"]["autograd_cache_miss"], counters["aot_autograd"]["autograd_cache_hit"]

    assert misses(resfx.Review()) == (1, 0)
    assert misses(resfx.Review()) == (0, 1)
    assert misses(resfx.Review(eps=1e-3)) == (1, 0)
    assert misses(resfx.Highway()) == (1, 0)


ONE_STEP = """
import live_toys, resfx
from torch._dynamo.utils import counters
model = live_toys.model()
resfx.attach(model, resfx.Review(), (live_toys.inputs(),))
model(live_toys.inputs()).sum().backward()
print(counters["aot_autograd"]["autograd_cache_miss"], counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_another_process_finds_what_was_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    for expected in ("1 0", "0 1"):
        command = [sys.executable, "-c", ONE_STEP]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
        assert done.stdout.strip() == expected, done.stderr[-2000:]
