"""Example inputs at another batch size follow the symbols of the export."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from resfx.export.call import make_call
from resfx.export.sizes import Sizes, batch_symbols, other_batches, widened


class Any2(nn.Module):
    def forward(self, a: Tensor, b: Tensor | None = None) -> Tensor:
        return a


def test_rows_are_repeated_wherever_the_symbol_stands() -> None:
    sizes = Sizes((("s0", "s1"), ("s1",), ("2*s0", "3"), ("7", "s0")), {"s0": (2, float("inf"))})
    tensors = (torch.arange(8).reshape(2, 4), torch.zeros(4), torch.zeros(4, 3), torch.zeros(7, 2))
    (size, first), *_ = other_batches(sizes, tensors)
    assert size == 3
    assert [tuple(t.shape) for t in first] == [(3, 4), (4,), (6, 3), (7, 3)]
    assert torch.equal(first[0][2], tensors[0][0])


def test_ranges_are_kept_and_smaller_batches_tried() -> None:
    sizes = Sizes((("s0", "3"),), {"s0": (2, 4)})
    assert [size for size, _ in other_batches(sizes, (torch.zeros(4, 3),))] == [3]


def test_batch_is_the_symbol_that_only_counts_rows() -> None:
    positions_first = Sizes((("s1",), ("s0", "s1"), ("s0",)), {})
    assert batch_symbols(positions_first, None) == ["s0"]
    assert batch_symbols(Sizes((("4", "s1"),), {}), None) == []


def test_unrelated_inputs_of_the_same_batch_grow_together() -> None:
    sizes = Sizes((("s0", "3"), ("s5",)), {})
    (_, (a, b)), *_ = other_batches(sizes, (torch.zeros(4, 3), torch.zeros(4)))
    assert (a.shape[0], b.shape[0]) == (5, 5)


def test_only_a_batch_of_one_is_widened() -> None:
    wide = widened(make_call(Any2(), (torch.zeros(1, 3),), {"b": torch.zeros(5)}))
    assert wide is not None
    assert [tuple(t.shape) for t in wide.tensors] == [(2, 3), (5,)]
    assert widened(make_call(Any2(), (torch.zeros(4, 3), torch.zeros(1, 3)), None)) is None


@pytest.mark.parametrize(
    ("args", "kwargs"), [((torch.zeros(2), torch.ones(2)), {}), ((torch.zeros(2),), {"b": torch.ones(2)})]
)
def test_a_call_is_rebuilt_as_it_was_made(args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
    call = make_call(Any2(), args, kwargs)
    assert call.names == ("a", "b")
    new_args, new_kwargs = call.rebuild([torch.full((2,), 5.0), torch.full((2,), 6.0)])
    assert len(new_args) == len(args)
    assert list(new_kwargs) == list(kwargs)
    assert float([*new_args, *new_kwargs.values()][1][0]) == 6.0
