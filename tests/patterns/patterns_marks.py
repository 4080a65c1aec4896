"""Small models whose source says what must be found: one class, a mark on each line that matters.

    @case((2, 5, 8), streams=0)
    class Snake(Net):
        def forward(self, x):
            return x + self.s(x)  # MISS learned: meets no weight

`# SITE` or `# SITE x3`: so many sites on this line. `# MISS stage: words`: a near miss with that stage, and these words
in its reason. Every line without a SITE mark must have no site. `Net` brings layers of width 8: `f`, `g`, `h`, norms `n`
and `m`.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch
from new_parameters import perturb
from torch import Tensor, nn

import resfx

D = 8
SITE = re.compile(r"# SITE(?: x(\d+))?$")
MISS = re.compile(r"# MISS (\w+): (.+)$")


class Net(nn.Module):
    """Base of the models; layers of width 8."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.g, self.h = (nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(3))
        self.n, self.m = nn.LayerNorm(D), nn.LayerNorm(D)
        self.a, self.b = nn.Parameter(torch.ones(D)), nn.Parameter(torch.ones(D))
        self.setup()

    def setup(self) -> None:
        """More layers."""


class ConvNet(Net):
    """The same on images: layers of 8 channels."""

    def setup(self) -> None:
        self.f, self.g, self.h = (nn.Sequential(nn.Conv2d(D, D, 3, padding=1), nn.ReLU()) for _ in range(3))
        self.n, self.m = nn.BatchNorm2d(D), nn.BatchNorm2d(D)


@dataclass(frozen=True)
class Case:
    model: type[nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    streams: int
    options: dict[str, Any] = field(default_factory=dict)

    def find(self) -> resfx.ResidualMap:
        return resfx.find(self.model().eval(), self.inputs(), **self.options)

    def check(self) -> resfx.ResidualMap:
        """Find, and compare with the marks."""
        lines, first = inspect.getsourcelines(self.model)
        file = inspect.getsourcefile(self.model)
        marks = [(f"{file}:{first + i}", line.rstrip()) for i, line in enumerate(lines)]
        found = self.find()
        wanted = Counter({at: int(mark[1] or 1) for at, line in marks if (mark := SITE.search(line))})
        assert Counter(site.source for site in found.sites) == wanted, _refusals(found)
        assert len(found.streams) == self.streams
        for at, line in marks:
            if mark := MISS.search(line):
                misses = [r for r in found.rejected if r.source == at and r.stage == mark[1] and mark[2] in r.reason]
                assert misses, f"{at}: {mark[1]}: {mark[2]}\n{_refusals(found)}"
        return found

    def check_rewritten(self, form: resfx.Form) -> None:
        """Rewrite: the same numbers at first, others once the new parameters have moved."""
        model, inputs = self.model().eval(), self.inputs()
        result = resfx.rewrite(model, form, inputs, warm_start=True).eval()
        assert torch.allclose(result(*inputs), model(*inputs), atol=1e-6)
        perturb(result)
        assert not torch.allclose(result(*inputs), model(*inputs), atol=1e-4)


def _refusals(found: resfx.ResidualMap) -> str:
    return "\n".join(f"{r.source} {r.stage}: {r.reason}" for r in found.rejected)


M = TypeVar("M", bound=type[nn.Module])
CASES: dict[str, list[Case]] = {}  # file -> its cases


def case(*shapes: tuple[int, ...], streams: int = 1, **options: Any) -> Callable[[M], M]:
    """Register a model with the shapes of its inputs; `options` go to `find`."""

    def register(model: M) -> M:
        sizes = shapes or ((2, 5, D),)
        made = Case(model, lambda: tuple(torch.randn(s) for s in sizes), streams, options)
        CASES.setdefault(model.__module__, []).append(made)
        return model

    return register


def cases_of(module: str) -> pytest.MarkDecorator:
    """Parametrize a test over the cases registered so far in `module`."""
    return pytest.mark.parametrize("case", CASES[module], ids=lambda c: c.model.__name__)
