"""The same numbers as the static rewrite on the models of `tests/models`, at the example's size and at a longer one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from live_helpers import Pair

import resfx

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from models_zoo import ZOO

QUICK = {
    "torchvision_resnet18": resfx.MultiGate(streams=2),
    "bert": resfx.Review(),
}
Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


def check(name: str, form: resfx.Form) -> None:
    entry = ZOO[name]
    _, args, kwargs = entry.build()
    pair = Pair(lambda: entry.build()[0], form, args, kwargs, std=0.1)
    with torch.no_grad():
        pair.assert_same(*args, gradients=False, **kwargs)
        if entry.longer is not None:
            args, kwargs = entry.longer(3)
            pair.assert_same(*args, gradients=False, **kwargs)


@pytest.mark.parametrize("name", QUICK)
def test_as_the_static_rewrite(name: str) -> None:
    check(name, QUICK[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_model_as_the_static_rewrite(name: str) -> None:
    check(name, resfx.DeltaAttention())
