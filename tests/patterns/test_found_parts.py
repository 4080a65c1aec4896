"""Values that lie beside the state in one tensor, and parts of the state that are worked on alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from new_parameters import perturb
from patterns_marks import CASES, Case, D, Net, case, cases_of
from torch import Tensor, nn
from torch.nn import functional as F

import resfx

M = TypeVar("M", bound=type[nn.Module])
PAIRS: list[tuple[type[nn.Module], type[nn.Module]]] = []  # two spellings of one model, the second without parts


def same_as(plain: Callable[[], type[nn.Module]]) -> Callable[[M], M]:
    def register(model: M) -> M:
        PAIRS.append((model, plain()))
        return model

    return register


class DualNet(Net):
    """Branches that read the state and all that has been put beside it."""

    def setup(self) -> None:
        self.maps = nn.ModuleList(nn.Linear(D + 3 * k, D + 3) for k in range(1, 5))
        self.start = nn.Linear(D, D + 3)


@case((2, 5, D))
class DualPathApart(DualNet):
    """The state and what lies beside it as two values."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.start(x)
        x, dense = self.f(x) + start[..., :D], start[..., D:]  # MISS structure: computed from another
        for layer in self.maps:
            out = layer(torch.cat([x, dense], -1)).tanh()
            x = x + out[..., :D]  # SITE x4
            dense = torch.cat([dense, out[..., D:]], -1)
        return torch.cat([x, dense], -1)


@same_as(lambda: DualPathApart)
@case((2, 5, D))
class DualPath(DualNet):
    """DPN: the state is the first channels of a value that each block makes wider."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.start(x)
        x = torch.cat([self.f(x) + start[..., :D], start[..., D:]], -1)
        for layer in self.maps:
            out = layer(x).tanh()
            x = torch.cat([x[..., :D] + out[..., :D], x[..., D:], out[..., D:]], -1)  # SITE x4
        return x


@same_as(lambda: DualPathApart)
@case((2, 5, D))
class DualPathSplit(DualNet):
    """The same, taken apart by `split`."""

    def forward(self, x: Tensor) -> Tensor:
        start = self.start(x)
        x = torch.cat([self.f(x) + start[..., :D], start[..., D:]], -1)
        for layer in self.maps:
            update, more = layer(x).tanh().split([D, 3], -1)
            state, dense = x.split([D, x.shape[-1] - D], -1)
            x = torch.cat([state + update, dense, more], -1)  # SITE x4
        return x


@case((2, 6, D), (2, 5, D))
class InjectionApart(Net):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        for layer in (self.g, self.h):
            x = x + F.pad(self.f(other), (0, 0, 1, 0))
            x = x + layer(self.n(x))  # SITE x2
        return x


@same_as(lambda: InjectionApart)
@case((2, 6, D), (2, 5, D))
class InjectionIntoAPart(Net):
    """TNT: another stream's map is added to all tokens but the class token, and the state joined again."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        for layer in (self.g, self.h):
            x = torch.cat([x[:, :1], x[:, 1:] + self.f(other)], 1)
            x = x + layer(self.n(x))  # SITE x2
        return x


@same_as(lambda: InjectionApart)
@case((2, 6, D), (2, 5, D))
class InjectionInPlace(Net):
    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        x = x.clone()
        for layer in (self.g, self.h):
            x[:, 1:] += self.f(other)
            x = x + layer(self.n(x))  # SITE x2
        return x


@case()
class UpdatesOfTheClassToken(Net):
    """One after the other: the part goes on, and so does the whole."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, :1] + self.f(x[:, :1]), x[:, 1:]], 1)  # SITE
        x = torch.cat([x[:, :1] + self.g(x).mean(1, keepdim=True), x[:, 1:]], 1)  # SITE
        return x + self.h(x)  # SITE


class Divided(Net):
    """TimeSformer: the tokens are updated, then all: the second branch reads the tokens, and the class token, apart."""

    def tokens(self, t: Tensor) -> Tensor:
        return self.f(self.n(t)).mean(1, keepdim=True) + self.f(t)

    def all(self, first: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.g(t) * self.m(first)
        return y.mean(1, keepdim=True), y


@case()
class DividedJoinedFirst(Divided):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.cat([x[:, :1], x[:, 1:] + self.tokens(x[:, 1:])], 1)  # SITE x2
            x = x + torch.cat(self.all(x[:, :1], x[:, 1:]), 1)  # SITE x2
            x = x + self.h(x)  # SITE x2
        return x


@same_as(lambda: DividedJoinedFirst)
@case()
class DividedJoinedLast(Divided):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            t = x[:, 1:] + self.tokens(x[:, 1:])  # SITE x2
            first = x[:, 0].unsqueeze(1)
            update = self.all(first, t)
            x = torch.cat([first, t], 1) + torch.cat(update, 1)  # SITE x2
            x = x + self.h(x)  # SITE x2
        return x


@case()
class DividedViewed(Divided):
    """A view of the tokens needs them packed in memory."""

    def forward(self, x: Tensor) -> Tensor:
        t = x[:, 1:] + self.f(x[:, 1:])  # SITE
        y = self.g(t.view(-1, D)).view(t.shape)
        x = torch.cat([x[:, :1], t], 1) + torch.cat([y[:, :1], y], 1)  # SITE
        return x + self.h(x)  # SITE


@case()
class DividedTurned(Divided):
    """The state is not put back as it was, so the second sum adds to something else than what its branch reads."""

    def forward(self, x: Tensor) -> Tensor:
        t = x[:, 1:] + self.f(x[:, 1:])  # SITE
        y = self.g(t)
        return torch.cat([t, x[:, 1:2]], 1) + torch.cat([y[:, :1], y], 1)  # MISS structure: computed from another


@case(streams=2)
class PartsTurned(Net):
    """The updated part comes back in another place: no state that goes on."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, 2:], x[:, :2] + self.f(x[:, :2])], 1)  # SITE
        return x + self.g(x)  # SITE


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()


def _case(model: type[nn.Module]) -> Case:
    return next(case for case in CASES[__name__] if case.model is model)


@pytest.mark.parametrize("form", [resfx.DeltaAttention(), resfx.MultiGate(streams=2), resfx.Review()], ids=str)
@pytest.mark.parametrize(("model", "plain"), PAIRS, ids=lambda model: model.__name__)
def test_both_spellings_are_rewritten_alike(model: type[nn.Module], plain: type[nn.Module], form: resfx.Form) -> None:
    inputs = _case(model).inputs()
    results = [resfx.rewrite(kind().eval(), form, inputs, warm_start=True).eval() for kind in (model, plain)]
    before = [result(*inputs) for result in results]
    for value in before:
        torch.testing.assert_close(value, plain().eval()(*inputs), atol=1e-5, rtol=1e-5)
    for result in results:
        perturb(result)
    after = [result(*inputs) for result in results]
    torch.testing.assert_close(after[0], after[1], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(after[0], before[0], atol=1e-3)


def test_what_reads_a_view_of_the_updated_part_still_can() -> None:
    model, inputs = DividedViewed().eval(), _case(DividedViewed).inputs()
    result = resfx.rewrite(model, resfx.DeltaAttention(), inputs, warm_start=True).eval()
    torch.testing.assert_close(result(*inputs), model(*inputs))
    perturb(result)
    assert not torch.allclose(result(*inputs), model(*inputs), atol=1e-3)


def test_a_part_that_comes_back_elsewhere_is_refused() -> None:
    found = _case(PartsTurned).find()
    assert "another order" in (found.streams[0].refused or "")
    assert found.streams[1].refused is None
