"""What a module that stays one call is given: the values of the moment, and what is said where it fails on them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import resfx


class Checked(nn.Module):
    """Looks at `sizes` only when it runs, as a check that is left out of an export does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and int(sizes.sum()) != 7:
            raise ValueError("the sizes do not fit")
        return self.inner(x).relu()


class Filled(nn.Module):
    """Fills a tensor slice by slice, and reads it nowhere else."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Checked(), Checked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = torch.zeros(2, dtype=torch.long)
        sizes[0], sizes[1] = 3, 4
        x = x + self.first(x, sizes)
        return x + self.second(x, sizes=sizes)


def test_a_tensor_that_was_filled_arrives_filled() -> None:
    model, x = Filled().eval(), torch.randn(2, 3, 6)
    rewritten = resfx.rewrite(model, resfx.DeltaAttention(), (x,), warm_start=True)
    torch.testing.assert_close(rewritten(x), model(x))


class Told(nn.Module):
    """Is told whether it is traced, and takes it amiss to be told so when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, traced: bool) -> torch.Tensor:
        if traced and not torch.compiler.is_compiling():
            raise ValueError("nothing is traced here")
        return self.inner(x).relu()


class Tells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Told()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.part(x, torch.compiler.is_compiling())


def test_a_captured_graph_that_fails_says_where() -> None:
    with pytest.raises(
        resfx.CaptureError, match=r"captured graph fails .* in module `part`: ValueError: nothing is traced"
    ):
        resfx.rewrite(Tells().eval(), resfx.DeltaAttention(), (torch.randn(2, 3, 6),))
