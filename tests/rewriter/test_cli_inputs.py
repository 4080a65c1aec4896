"""`--input`: what the specs mean, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from resfx.cli_inputs import UsageError, complete_inputs, parse_input


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 4)
        self.types = nn.Embedding(3, 4)

    def forward(self, ids: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, flag: bool = True) -> Tensor:
        return self.tokens(ids) * scale


NET = Net()


def value(spec: str) -> Any:
    return parse_input(spec, NET)[1]


def test_floats_are_normal_and_seeded() -> None:
    torch.manual_seed(3)
    expected = torch.randn(2, 3, 4)
    torch.manual_seed(3)
    assert torch.equal(value("x=float32[2,3,4]"), expected)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int64", "int32", "uint8", "bool"])
def test_dtype_and_shape(dtype: str) -> None:
    tensor = value(f"x={dtype}[2,5]")
    assert tensor.dtype is getattr(torch, dtype)
    assert tensor.shape == (2, 5)


def test_integers_fit_every_embedding() -> None:
    ids = value("ids=int64[100]")
    assert set(ids.tolist()) == {0, 1, 2}


@pytest.mark.parametrize(("spec", "low", "high"), [("x=int64[500]:7", 0, 7), ("x=int32[500]:-3:2", -3, 2)])
def test_integer_ranges(spec: str, low: int, high: int) -> None:
    assert set(value(spec).tolist()) == set(range(low, high))


def test_bool_masks_are_true() -> None:
    assert value("mask=bool[3,3]").all()


def test_scalar_shape() -> None:
    assert value("x=float32[]").shape == ()


def test_files(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    torch.save(tensor, tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", tensor.numpy())
    assert torch.equal(value(f"x={tmp_path / 'a.pt'}"), tensor)
    assert torch.equal(value(f"x={tmp_path / 'a.npy'}"), tensor)


@pytest.mark.parametrize(("text", "expected"), [("False", False), ("None", None), ("3", 3), ("'a'", "a")])
def test_literals(text: str, expected: object) -> None:
    assert value(f"x={text}") == expected


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("float32[2,3]", "not of the form"),
        ("x=float33[2,3]", "unknown dtype"),
        ("x=float32[2,,3 4]", "shape"),
        ("x=float32[2]:5", "range is for integers"),
        ("x=int8[2]:1000", "no int8 lies in"),
        ("x=int64[2]:5:5", "no int64 lies in"),
        ("x=missing.pt", "no file missing.pt"),
        ("x=what", "can't read"),
    ],
)
def test_refused(spec: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        value(spec)


def test_a_file_that_holds_no_tensor(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(2)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="holds a dict"):
        value(f"x={tmp_path / 'a.pt'}")


def test_leading_arguments_go_by_position() -> None:
    args, kwargs = complete_inputs(Net(), None, ["mask=bool[2,5]", "ids=int64[2,5]", "flag=False"])
    assert [tensor.dtype for tensor in args] == [torch.int64, torch.bool]
    assert kwargs == {"flag": False}


def test_after_a_gap_arguments_go_by_keyword() -> None:
    args, kwargs = complete_inputs(Net(), None, ["scale=2.0", "ids=int64[2,5]"])
    assert len(args) == 1
    assert kwargs == {"scale": 2.0}


def test_specs_lie_over_known_inputs() -> None:
    known = (torch.zeros(2, 5, dtype=torch.int64),), {"flag": False}
    args, kwargs = complete_inputs(Net(), known, ["ids=int64[7,5]"])
    assert args[0].shape == (7, 5)
    assert kwargs == {"flag": False}
    assert complete_inputs(Net(), known, []) is known


def test_unknown_and_missing_names() -> None:
    with pytest.raises(UsageError, match=r"no argument 'idz'.*ids, mask, scale, flag"):
        complete_inputs(Net(), None, ["idz=int64[2,5]"])
    with pytest.raises(UsageError, match=r"needs ids.*\n.*--input ids="):
        complete_inputs(Net(), None, ["flag=True"])


def test_variadic_keywords_take_any_name() -> None:
    class Loose(nn.Module):
        def forward(self, x: Tensor, **rest: Tensor) -> Tensor:
            return x

    args, kwargs = complete_inputs(Loose(), ((torch.zeros(1),), {"a": 1}), ["b=2"])
    assert len(args) == 1
    assert kwargs == {"a": 1, "b": 2}
