"""What a compiled package takes: written as text, and each call checked against it. No compiler is needed for that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from resfx.export import InputError
from resfx.export.call import make_call
from resfx.export.capture import capture
from resfx.export.entry import Entry, entry_of
from resfx.export.entry_check import EntryCheck


class Net(nn.Module):
    """x (B, T, 8), mask (B, T), T at most 16 -> (B, T, 8)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.places = nn.Embedding(16, 8)

    def forward(self, x: Tensor, mask: Tensor, extra: dict[str, Tensor] | None = None, times: float = 1.0) -> Tensor:
        h = self.linear(x) * mask.unsqueeze(-1) * times + self.places.weight[: x.shape[1]]
        return h if extra is None else h + extra["shift"] - extra["other"]


class Pairs(nn.Module):
    """x (B, 8), B even -> (B / 2, 16)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().view(-1, 16)


class Doubled(nn.Module):
    """x (B, 8), y (2 B, 8)."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.cat([x, x]) + y


def check_for(model: nn.Module, *args: Any, **kwargs: Any) -> EntryCheck:
    call = make_call(model, args, kwargs)
    entry = entry_of(call, capture(model.eval(), call, flat=False).program)
    assert Entry.from_text(entry.to_text()) == entry
    return EntryCheck(entry)


def example(rows: int = 3, length: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, length, 8), torch.ones(rows, length)


@pytest.fixture(scope="module")
def net() -> EntryCheck:
    return check_for(Net(), *example())


@pytest.mark.parametrize(("rows", "length"), [(3, 5), (1, 5), (7, 16), (2, 1)])
def test_open_sizes_pass(net: EntryCheck, rows: int, length: int) -> None:
    x, mask = example(rows, length)
    args, kwargs = net((x, mask), {})
    assert args[0] is x
    assert args[1] is mask
    assert kwargs == {}


def test_a_column_of_one_row_is_contiguous_whatever_its_stride(net: EntryCheck) -> None:
    x, mask = example(4, 5)
    net((x[:, :1].contiguous()[:1], mask[:1, :1]), {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, m: (x.double(), m), r"`x` is torch.float64, the package takes torch.float32"),
        (lambda x, m: (x[0], m), r"`x` has 2 dimensions, the package takes \[\*, \*, 8\]"),
        (lambda x, m: (x[..., :7].contiguous(), m), r"`x`, axis 2: size 7, .*\[\*, \*, 8\]"),
        (lambda x, m: (x, m[:, :4].contiguous()), r"`mask`, axis 1: size 4, .*\[x.shape\[0\], x.shape\[1\]\], here 5"),
        (lambda x, m: (x, m[:2]), r"`mask`, axis 0: size 2, .*here 3"),
        (lambda x, m: example(3, 17), r"`x` axis 1 = 17: the package was compiled for x.shape\[1\] <= 16"),
        (lambda x, m: (x.transpose(0, 1).contiguous().transpose(0, 1), m), r"`x` has the strides .*x.contiguous\(\)"),
        (lambda x, m: (x, 1.0), r"`mask` is 1.0, the package takes a tensor"),
        (lambda x, m: (x.to("meta"), m), r"`x` is on meta, the package runs on cpu"),
        (lambda x, m: (x,), r"does not fit the package, which takes \(x, mask\)"),
        (lambda x, m: (x, m, None), r"does not fit the package, which takes \(x, mask\)"),
    ],
)
def test_what_does_not_fit_is_named(net: EntryCheck, change: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        net(change(*example()), {})


def test_constants_and_keywords() -> None:
    x, mask = example()
    extra = {"shift": torch.zeros(3, 5, 8), "other": torch.zeros(3, 5, 8)}
    check = check_for(Net(), x, mask, extra=extra, times=2.0)
    turned = {"other": torch.ones(3, 5, 8), "shift": torch.zeros(3, 5, 8)}
    _, kwargs = check((x, mask), {"times": 2.0, "extra": turned})
    assert list(kwargs) == ["extra", "times"]
    assert list(kwargs["extra"]) == ["shift", "other"]
    assert kwargs["extra"]["other"] is turned["other"]
    with pytest.raises(InputError, match=r"`times` is 3.0, the package was compiled for 2.0 as a constant"):
        check((x, mask), {"extra": extra, "times": 3.0})
    with pytest.raises(InputError, match=r"`extra_shift` is torch.int64"):
        check((x, mask), {"extra": {**extra, "shift": torch.zeros(3, 5, 8, dtype=torch.int64)}, "times": 2.0})
    with pytest.raises(
        InputError, match=r"takes \(x, mask, extra={shift: extra_shift, other: extra_other}, times=times\)"
    ):
        check((x, mask), {"times": 2.0})


def test_what_the_export_assumed_about_sizes() -> None:
    check = check_for(Pairs(), torch.randn(4, 8))
    check((torch.randn(6, 8),), {})
    with pytest.raises(InputError, match=r"`x` axis 0 = 5, .*was compiled for .*x.shape\[0\]"):
        check((torch.randn(5, 8),), {})


def test_a_size_that_depends_on_another() -> None:
    check = check_for(Doubled(), torch.randn(3, 8), torch.randn(6, 8))
    check((torch.randn(5, 8), torch.randn(10, 8)), {})
    with pytest.raises(InputError, match=r"`y`, axis 0: size 9, .*here 10"):
        check((torch.randn(5, 8), torch.randn(9, 8)), {})


def test_an_example_of_one_row_fits_its_own_package() -> None:
    check = check_for(Net(), *example(1, 5))
    check(example(1, 5), {})
    check(example(4, 6), {})


def test_a_layout_of_the_example_is_asked_for() -> None:
    turned = torch.randn(8, 4).t()
    check = check_for(nn.Linear(8, 8), turned)
    check((turned,), {})
    with pytest.raises(InputError, match="strides"):
        check((torch.randn(4, 8),), {})
