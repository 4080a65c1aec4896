"""The table of exactness: every form on every kind of model, through the public rewrite, to 1e-9 in float64."""

from __future__ import annotations

import pytest
import torch
from passes_exactness import FORMS, KINDS, worst_errors
from torch import nn

import resfx
from resfx.passes.form import Form


def cells() -> list[object]:
    """All of them; a fifth, in rotation, in the default run."""
    return [
        pytest.param(kind, form, id=f"{kind}-{form.to_spec()}", marks=[pytest.mark.slow] if (i + j) % 5 else [])
        for i, form in enumerate(FORMS)
        for j, kind in enumerate(KINDS)
    ]


@pytest.mark.parametrize(("kind", "form"), cells())
def test_form_is_exact(kind: str, form: Form) -> None:
    errors = worst_errors(kind, form)
    assert errors.output < 1e-9
    assert errors.gradient < 1e-9


def test_a_parameter_off_by_a_millionth_is_seen() -> None:
    def spoil(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("residual.0.2.query").mul_(1 + 1e-6)

    errors = worst_errors("pre-norm", resfx.DeltaAttention(), spoil)
    assert errors.output > 1e-9
    assert errors.gradient > 1e-9


def test_every_form_has_a_row() -> None:
    assert {type(form) for form in FORMS} == set(resfx.passes.FORMS.values())
