"""The live mode and the static rewrite give the same numbers on every small model of `tests/cases` that both take."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_helpers import CASES, Pair, case, example

import resfx

FORMS = (
    resfx.DeltaAttention(),
    resfx.MultiGate(streams=2),
    resfx.AttentionResidual(),
    resfx.Review(),
    resfx.ScaledLoop(learnable=True),
    resfx.DeltaAttention(granularity="block", block_size=2),
    resfx.Highway(),
)
# Each has sites, and a form that both modes take.
REWRITABLE = (
    "08", "10", "11", "12", "14", "15", "17", "19", "20", "21", "23", "25", "27", "28", "30", "31", "34",
)  # fmt: skip


def _path(number: str) -> Path:
    return next(CASES.glob(f"case{number}_*.py"))


def _check(number: str, form: resfx.Form) -> None:
    module = case(_path(number))
    args, kwargs = example(module)
    pair = Pair(module.make, form, args, kwargs)
    pair.assert_same(*args, gradients=getattr(module, "BACKWARD", True), **kwargs)


@pytest.mark.parametrize(("index", "number"), list(enumerate(REWRITABLE)), ids=REWRITABLE)
def test_as_the_static_rewrite(index: int, number: str) -> None:
    _check(number, FORMS[index % len(FORMS)])


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.to_spec())
@pytest.mark.parametrize("number", REWRITABLE)
def test_every_form_as_the_static_rewrite(number: str, form: resfx.Form) -> None:
    _check(number, form)


@pytest.mark.parametrize("number", ["01", "03", "04", "06", "07"])
def test_what_is_no_residual_is_none_here(number: str) -> None:
    module = case(_path(number))
    args, kwargs = example(module)
    with pytest.raises(resfx.NoResidualFound):
        resfx.attach(module.make(), resfx.DeltaAttention(), args, kwargs, backend="eager")
