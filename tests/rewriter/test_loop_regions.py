"""`ScaledLoop(loops=K)` where autocast regions lie in the body that repeats, or around it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import resfx

D = 8


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.norm(x))))


class Inside(nn.Module):
    """Every branch in a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sub, self.head, self.mixed = nn.ModuleList(Branch() for _ in range(2)), nn.Linear(D, D), True

    def autocast(self, enabled: bool = True) -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled and self.mixed)

    def update(self, sub: nn.Module, x: Tensor) -> Tensor:
        with self.autocast():
            u = sub(x)
        return u.float()

    def stream(self, x: Tensor, loops: int, scale: float) -> Tensor:
        for _ in range(loops):
            for sub in self.sub:
                u = self.update(sub, x)
                x = x + (u if scale == 1 else scale * u)
        return x

    def forward(self, x: Tensor, loops: int = 1, scale: float = 1.0) -> Tensor:
        return self.head(self.stream(x, loops, scale))


class Nested(Inside):
    """A region in a region: half of the branch runs in full precision."""

    def update(self, sub: nn.Module, x: Tensor) -> Tensor:
        with self.autocast():
            u = torch.tanh(sub.a(x))
            with self.autocast(False):
                u = sub.b(u.float())
            return torch.tanh(sub.a(u)).float()


class Around(Inside):
    """One region around the stream, its entry and its end."""

    def update(self, sub: nn.Module, x: Tensor) -> Tensor:
        return sub(x).float()

    def forward(self, x: Tensor, loops: int = 1, scale: float = 1.0) -> Tensor:
        with self.autocast():
            return self.head(self.stream(self.head(x).float(), loops, scale)).float()


class Ending(Around):
    """The region ends where the stream does."""

    def forward(self, x: Tensor, loops: int = 1, scale: float = 1.0) -> Tensor:
        with self.autocast():
            x = self.stream(x, loops, scale)
        return self.head(x)


KINDS = [Inside, Nested, Around, Ending]


def made(kind: type[Inside]) -> tuple[Inside, Tensor]:
    torch.manual_seed(0)
    return kind(), torch.randn(3, 5, D)


@pytest.mark.parametrize("kind", KINDS)
def test_every_repeat_runs_in_its_regions(kind: type[Inside]) -> None:
    model, x = made(kind)
    result = resfx.rewrite(model, resfx.ScaledLoop(loops=3), (x,))
    for loops in (3, 2):
        result.set_loops(0, loops)
        scale = 1 / (loops * math.sqrt(2))
        with torch.no_grad():
            assert torch.equal(result(x), model(x, loops, scale))
            model.mixed = False
            assert not torch.equal(result(x), model(x, loops, scale))
            model.mixed = True
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_and_compile(kind: type[Inside]) -> None:
    model, x = made(kind)
    result = resfx.rewrite(model, resfx.ScaledLoop(loops=2), (x,))
    compiled = torch.compile(result, backend="aot_eager", fullgraph=True)
    model(x, 2, 1 / (2 * math.sqrt(2))).square().sum().backward()
    want = {name: p.grad for name, p in model.named_parameters()}
    for call in (result, compiled):
        result.zero_grad()
        call(x).square().sum().backward()
        for name, p in result.named_parameters():
            torch.testing.assert_close(p.grad, want[name], rtol=1e-2, atol=1e-2)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, x = made(Inside)
    result = resfx.rewrite(model, resfx.ScaledLoop(loops=2), (x,))
    resfx.save(result, tmp_path / "saved")
    assert torch.equal(resfx.load(model, tmp_path / "saved", (x,))(x), result(x))


class Crossing(Inside):
    """The region begins in the middle of the stream and ends after it."""

    def forward(self, x: Tensor, loops: int = 1, scale: float = 1.0) -> Tensor:
        x = x + self.sub[0](x)
        with self.autocast():
            x = x + self.sub[1](x).float()
            return self.head(x).float()


def test_a_region_that_crosses_the_end_is_refused() -> None:
    model, x = made(Crossing)
    with pytest.raises(resfx.RewriteError, match="autocast region begins or ends in the middle of it"):
        resfx.rewrite(model, resfx.ScaledLoop(loops=2), (x,))
