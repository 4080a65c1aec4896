"""Sites that no output depends on, kept in the graph by a dropout alone: they stay as they are."""

from __future__ import annotations

import pytest
import torch
from new_parameters import new_parameters, perturb
from torch import Tensor, nn

import resfx

FORMS = [resfx.DeltaAttention(), resfx.MultiGate(streams=2), resfx.Review()]


class TwoStreams(nn.Module):
    """The second stream steers the first one; its last states steer nothing any more."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.g = (nn.ModuleList(nn.Linear(8, 8) for _ in range(layers)) for _ in range(2))
        self.n = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for f, g in zip(self.f, self.g, strict=True):
            steer = g(y)  # read for the last time by x, and by an update of y that nobody reads
            x = x + f(self.n(x)) * torch.sigmoid(steer)
            y = self.n(y + self.drop(steer))
            y = y + self.drop(g(self.n(y)))
        return x


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_reaches_no_output_stays_plain(form: resfx.Form) -> None:
    model, args = TwoStreams(3).eval(), (torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    warm = resfx.rewrite(model, form, args, warm_start=True)
    assert torch.allclose(warm(*args), model(*args), atol=1e-6)
    results = []
    for each in (warm.train(), model.train()):
        torch.manual_seed(1)
        results.append(each(*args))
    assert torch.allclose(*results, atol=1e-6)
    assert not warm.residual_map.refused
    unread = [site for site in warm.residual_map.sites if site.refused]
    assert len(unread) == 1
    assert "no output" in str(unread[0].refused)
    warm.eval()
    perturb(warm)
    warm(*args).square().sum().backward()
    graded = dict(warm.named_parameters())
    assert all(graded[name].grad.abs().max() > 0 for name in new_parameters(warm))  # type: ignore[union-attr]


def test_a_stream_that_reaches_no_output_is_refused() -> None:
    model, args = TwoStreams(1).eval(), (torch.randn(2, 5, 8), torch.randn(2, 5, 8))
    with pytest.warns(UserWarning, match="no output depends on it"):
        result = resfx.rewrite(model, resfx.MultiGate(streams=2), args, warm_start=True)
    assert list(result.residual_map.refused.values()) == ["no output depends on it"]
    assert torch.allclose(result(*args), model(*args), atol=1e-6)
