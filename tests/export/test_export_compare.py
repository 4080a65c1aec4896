"""The one comparison rule: it must find small, rare and structural differences, and let round-off pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from resfx.export.compare import compare, tolerance_for
from resfx.export.errors import OutputMismatchError

WANT = torch.linspace(-1, 1, 1000)


def check(got: torch.Tensor, want: torch.Tensor = WANT) -> None:
    compare(["first", "second"], [torch.zeros(2), got], [torch.zeros(2), want], tolerance_for([want]), "the test")


def test_round_off_passes() -> None:
    (_, second) = compare(["a", "b"], [WANT, WANT * (1 + 1e-7)], [WANT, WANT], 2e-5, "the test")
    assert 0 < second.norm < 1e-6
    assert 0 < second.largest < 1e-6


@pytest.mark.parametrize("factor", [1 + 1e-4, -1.0, 3.0])
def test_a_wrong_scale_is_found(factor: float) -> None:
    with pytest.raises(OutputMismatchError, match=r"output 'second' \(number 1\) of the test"):
        check(WANT * factor)


def test_one_wrong_element_among_many_is_found_and_named() -> None:
    want = torch.ones(1000, 1000)
    got = want.clone()
    got[3, 7] += 0.01  # moves the norm by 1e-5 only
    with pytest.raises(OutputMismatchError) as caught:
        check(got, want)
    assert caught.value.index == (3, 7)
    assert caught.value.output == "second"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_must_stand_in_the_same_places(value: float) -> None:
    got = WANT.clone()
    got[5] = value
    with pytest.raises(OutputMismatchError, match=r"at \[5\]"):
        check(got)
    check(got, got.clone())


def test_shape_dtype_and_count_must_agree() -> None:
    with pytest.raises(OutputMismatchError, match="float64"):
        check(WANT.double())
    with pytest.raises(OutputMismatchError, match="10, 100"):
        check(WANT.reshape(10, 100))
    with pytest.raises(OutputMismatchError, match="1 outputs, the model 2"):
        compare(["a", "b"], [WANT], [WANT, WANT], 2e-5, "the test")


def test_integers_must_be_equal() -> None:
    want = torch.arange(5)
    check(want.clone(), want)
    with pytest.raises(OutputMismatchError):
        check(want + torch.tensor([0, 0, 0, 0, 1]), want)


def test_another_model_differs() -> None:
    """tanh GELU for erf GELU is the smallest error seen in practice; the default tolerance tells them apart."""
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    with pytest.raises(OutputMismatchError):
        check(nn.GELU(approximate="tanh")(x), nn.GELU()(x))


def test_the_coarsest_dtype_sets_the_tolerance() -> None:
    assert tolerance_for([torch.zeros(1), torch.zeros(1, dtype=torch.float16)]) == 1e-2
    assert tolerance_for([torch.zeros(1, dtype=torch.float64)]) == 1e-10
    assert tolerance_for([torch.zeros(1, dtype=torch.int64)]) == 0.0
    assert tolerance_for([torch.zeros(1)], 1e-3) == 1e-3
