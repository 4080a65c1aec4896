"""`x + F(x)` around a whole stream that starts with x is a site; x added to a state that runs on or lives on is an injection."""

from __future__ import annotations

import torch
from new_parameters import perturb
from patterns_marks import Case, D, Net, case, cases_of
from torch import Tensor

import resfx


@case(streams=2)
class AroundItsStream(Net):
    """X-CLIP: a whole encoder, which starts with positions added to x, updates x."""

    def forward(self, x: Tensor) -> Tensor:
        state = x + self.b
        for layer in (self.f, self.g):
            state = state + layer(state)  # SITE x2
        return self.n(x + self.a * state)  # SITE


@case()
class TheStreamGoesOn(Net):
    def forward(self, x: Tensor) -> Tensor:
        state = x
        for layer in (self.f, self.g):
            state = state + layer(state)  # SITE x2
        state = state + x  # MISS order: injected
        return state + self.h(state)  # SITE


@case()
class TheStateLivesOn(Net):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state = x
        for layer in (self.f, self.g):
            state = state + layer(state)  # SITE x2
        return state, x + state  # MISS order: injected


@case()
class AddedBesideTheState(Net):
    """The stream starts with a sum of two inputs: neither alone is its state."""

    def forward(self, x: Tensor) -> Tensor:
        positions = x.cumsum(1)
        state = x + positions  # MISS learned: no weight
        for layer in (self.f, self.g):
            state = state + layer(state)  # SITE x2
        return self.n(state + positions)  # MISS order: injected


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()


def test_the_long_skip_alone_is_rewritten() -> None:
    model, x = AroundItsStream().eval(), torch.randn(2, 5, D)
    long = next(stream.index for stream in resfx.find(model, (x,)).streams if len(stream.sites) == 1)
    result = resfx.rewrite(model, resfx.MultiGate(), (x,), streams=[long], warm_start=True).eval()
    assert torch.allclose(result(x), model(x), atol=1e-6)
    perturb(result)
    assert not torch.allclose(result(x), model(x), atol=1e-4)
