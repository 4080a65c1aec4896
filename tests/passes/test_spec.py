"""Forms as text, and their options: round trip, registry, refusals that name the valid set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_events import FORMS as EXAMPLES

import resfx.passes
from resfx.passes import (
    FORMS,
    AttentionResidual,
    DeltaAttention,
    FormError,
    Highway,
    MultiGate,
    Review,
    ScaledLoop,
    Standard,
    from_spec,
)
from resfx.passes.form import Form


@pytest.mark.parametrize("form", [*EXAMPLES, DeltaAttention(eps=1e-8, query_init_std=0.02)], ids=str)
def test_round_trip(form: Form) -> None:
    assert from_spec(form.to_spec()) == form
    assert from_spec(repr(form)) == form


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("delta(granularity=block, blocks=4)", DeltaAttention(granularity="block", blocks=4)),
        ("DeltaAttention(granularity='block', block_size=2)", DeltaAttention(granularity="block", block_size=2)),
        ("multi_gate(streams=3, b_base=-2)", MultiGate(streams=3, b_base=-2.0)),
        ("attention_residual", AttentionResidual()),
        ("review()", Review()),
        ("highway(convex=true)", Highway(convex=True)),
        ("scaled_loop(lam=0.5,learnable=True)", ScaledLoop(lam=0.5, learnable=True)),
        (" standard ", Standard()),
    ],
)
def test_reading(text: str, form: Form) -> None:
    assert from_spec(text) == form


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gamma", "unknown form 'gamma'; the forms are attention_residual, delta"),
        ("delta(", "can't read the form"),
        ("delta(size=3)", "unknown option 'size'; the valid ones: granularity, block_size, blocks, seeded"),
        ("standard(eps=1)", "unknown option 'eps'; the valid ones: it has none"),
        ("delta(seeded)", "'seeded' needs a value"),
        ("delta(seeded=yes)", "seeded=yes is not a value of type bool"),
        ("delta(blocks=two)", "blocks=two is not a value of type int"),
        ("review(eps=1e-5, eps=1e-6)", "eps is given twice"),
        ("delta(gate=soft)", "gate='soft' is unknown; it is one of none, scalar, vector, alpha"),
        ("delta(granularity=full)", "granularity='full' is unknown; it is one of sublayer, block"),
        ("delta(blocks=2)", "blocks belongs to granularity=block"),
        ("delta(granularity=block)", "exactly one of block_size and blocks"),
        ("delta(granularity=block, blocks=2, block_size=2)", "exactly one of block_size and blocks"),
        ("delta(granularity=block, block_size=0)", "block_size=0 must be at least 1"),
        ("delta(official_sources=true)", "official_sources belongs to granularity=block"),
        ("delta(granularity=block, blocks=2, official_sources=true, seeded=true)", "not with seeded"),
        ("delta(eps=0)", "eps=0.0 must be positive"),
        ("delta(query_init_std=-1)", "must not be negative"),
        ("attention_residual(granularity=sublayer)", "it is one of full, block"),
        ("multi_gate(gate=both)", "it is one of independent, competitive"),
        ("multi_gate(streams=0)", "streams=0 must be at least 1"),
        ("scaled_loop(lam=nan)", "must be finite"),
        ("multi_gate(b_base=nan)", "multi_gate: b_base=nan must be finite"),
        ("multi_gate(b_base=-1000)", "b_base=-1000.0 must lie between -100 and 100"),
        ("review(eps=inf)", "eps=inf must be finite"),
        ("delta(query_init_std=inf)", "query_init_std=inf must be finite"),
        ("multi_gate(streams=True)", "streams=True is not a value of type int"),
        ("multi_gate(l_base=0)", "l_base=0 must be at least 1"),
        ("scaled_loop(tied=True)", "unknown option 'tied'; the valid ones: lam, loops, learnable"),
        ("review(eps=-1)", "must be positive"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(FormError) as caught:
        from_spec(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MultiGate(streams=True),
        lambda: DeltaAttention(granularity="block", blocks=True),
        lambda: AttentionResidual(granularity="block", block_size=2.0),
        lambda: Review(eps=True),
        lambda: Highway(convex=1),
        lambda: ScaledLoop(loops=True),
        lambda: DeltaAttention(gate=None),
    ],
)
def test_values_of_another_type_are_refused(make: Callable[[], Form]) -> None:
    """A flag is no number, and a number no flag."""
    with pytest.raises(FormError, match=r"=(True|1|2\.0|None) is not of type|gate=None is unknown; it is one of none"):
        make()


def test_the_registry_is_the_files() -> None:
    """Every form is registered under its own name, has a file of its own, and can be imported from the package."""
    folder = Path(resfx.passes.__file__).parent
    defining = {path.stem for path in folder.glob("*.py") if "(Form):" in path.read_text()}
    assert defining == {form.__module__.rpartition(".")[2] for form in FORMS.values()}
    for name, form in FORMS.items():
        assert form.name == name
        assert getattr(resfx.passes, form.__name__) is form
    assert {type(form) for form in EXAMPLES} == set(FORMS.values())


def test_the_option_set_is_the_published_one() -> None:
    """The constructors as documented, `loops` aside."""
    text = "DeltaAttention(granularity='sublayer', block_size=None, blocks=None, seeded=False, null_source=False, "
    text += "gate='none', official_sources=False, query_init_std=0.0, eps=1e-06, tied=False)"
    assert repr(DeltaAttention()) == text
    assert repr(MultiGate()) == (
        "MultiGate(streams=4, gate='independent', b_base=-3.0, l_base=21, eps=1e-06, tied=False)"
    )
    assert repr(Review()) == "Review(eps=1e-05, tied=False)"
    assert repr(Highway()) == "Highway(convex=False, tied=False)"
