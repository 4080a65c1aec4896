"""Sites that no output depends on stay plain under attach, as they do under rewrite."""

from __future__ import annotations

from typing import Any

import live_toys
import pytest
import torch
from live_helpers import Pair, assert_close
from torch import Tensor, nn

import resfx

FORMS = [resfx.DeltaAttention(), resfx.MultiGate(streams=2), resfx.Review()]


class TwoStreams(nn.Module):
    """The second stream steers the first one; its last states steer nothing any more. `told`: they are outputs too."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.f, self.g = (nn.ModuleList(nn.Linear(8, 8) for _ in range(layers)) for _ in range(2))
        self.n = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor, told: bool = False) -> Any:
        for f, g in zip(self.f, self.g, strict=True):
            steer = g(y)
            x = x + f(self.n(x)) * torch.sigmoid(steer)
            y = self.n(y + self.drop(steer))
            y = y + self.drop(g(self.n(y)))
        return (x, y) if told else x


def inputs() -> tuple[Tensor, Tensor]:
    return live_toys.inputs(2, 5), live_toys.inputs(2, 5) * 2


def pair_of(layers: int, form: resfx.Form) -> Pair:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return TwoStreams(layers).eval()

    return Pair(make, form, inputs())


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_reaches_no_output_stays_plain(form: resfx.Form) -> None:
    pair = pair_of(3, form)
    pair.assert_same(*inputs())
    results = []
    for model in (pair.live.train(), pair.static.train()):
        torch.manual_seed(1)
        results.append(model(*inputs()))
    assert_close([results[0]], [results[1]])


def test_the_map_says_so() -> None:
    model = TwoStreams(3).eval()
    found = resfx.attach(model, FORMS[0], inputs(), backend="eager")
    unread = [site for site in found.sites if site.refused]
    assert [str(site.refused) for site in unread] == ["no output depends on it"]


def test_a_stream_that_reaches_no_output_is_left_plain() -> None:
    with pytest.warns(UserWarning, match="no output depends on it"):
        pair = pair_of(1, FORMS[1])
    pair.assert_same(*inputs())


def test_a_call_that_reads_further_than_the_example() -> None:
    """Its parameters would be missing."""
    pair = pair_of(3, FORMS[0])
    with pytest.raises(resfx.LiveError, match="reads states"):
        pair.live(*inputs(), told=True)
