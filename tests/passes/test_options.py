"""Every option on every path: granularity x gate x sources x sharing x where the norms are, against the eager reference."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_events import CONV, MODELS, run

from resfx.passes import AttentionResidual, DeltaAttention, FormError, Highway, MultiGate, Review, ScaledLoop
from resfx.passes.form import Form

PLACEMENTS = ["pre", "post", "relu", "side", "scale", "slice", "taps", "post_taps", "tied", "conv_relu", "conv_side"]
BLOCKS = [{"block_size": 1}, {"block_size": 2}, {"block_size": 5}, {"blocks": 1}, {"blocks": 2}, {"blocks": 3}]


def delta_forms() -> list[Form]:
    """All combinations that make sense, without `query_init_std` and `eps`."""
    found: list[Form] = []
    flags = itertools.product(("none", "scalar", "vector", "alpha"), (False, True), (False, True))
    for gate, null_source, tied in flags:
        common = {"gate": gate, "null_source": null_source, "tied": tied}
        for seeded in (False, True):
            found.append(DeltaAttention(seeded=seeded, **common))
            found += [DeltaAttention(granularity="block", seeded=seeded, **common, **b) for b in BLOCKS]
        found += [DeltaAttention(granularity="block", official_sources=True, **common, **b) for b in BLOCKS]
    return found


def other_forms() -> list[Form]:
    found: list[Form] = []
    for tied in (False, True):
        found.append(AttentionResidual(tied=tied))
        found += [AttentionResidual(granularity="block", tied=tied, **b) for b in BLOCKS]
        found += [MultiGate(streams=n, gate=g, tied=tied) for n in (1, 2, 4) for g in ("independent", "competitive")]
        found += [MultiGate(streams=2, b_base=-1.0, l_base=5, tied=tied), Review(tied=tied)]
        found += [Highway(convex=convex, tied=tied) for convex in (False, True)]
    return found + [ScaledLoop(lam=lam, learnable=learnable) for lam in (0.5, -2.0) for learnable in (False, True)]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(delta_forms()), st.sampled_from(PLACEMENTS))
def test_delta(form: Form, placement: str) -> None:
    run(placement, form, "aten")


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(other_forms()), st.sampled_from(PLACEMENTS))
def test_others(form: Form, placement: str) -> None:
    run(placement, form, "aten")


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_all_of_them(placement: str) -> None:
    for form in (*delta_forms(), *other_forms()):
        run(placement, form, "aten")


def test_the_rest_is_refused() -> None:
    """What the lists above leave out has no meaning."""
    for options in ({"official_sources": True}, {"blocks": 2}, {"block_size": 2}):
        with pytest.raises(FormError, match="belongs to granularity=block"):
            DeltaAttention(**options)
    with pytest.raises(FormError, match="belongs to granularity=block"):
        AttentionResidual(blocks=2)
    assert len(delta_forms()) == len(set(delta_forms())) == 16 * (2 * 7 + 6)


def test_the_placements_exist() -> None:
    assert set(PLACEMENTS) <= {*MODELS, *CONV}
