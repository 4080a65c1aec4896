"""A norm on a part of the state, put back in its place, is a transition: forms apply it to what they merge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import resfx

D = 8


class ClassAttention(nn.Module):
    """Two updates with a norm of the first token between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.f, self.g, self.n = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)

    def transition(self, x: Tensor) -> Tensor:
        return torch.cat([self.n(x[:, :1]), x[:, 1:]], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        x = x + self.f(x)
        x = self.transition(x)
        return x + self.g(x)


def x(batch: int = 3) -> Tensor:
    return torch.randn(batch, 5, D, generator=torch.Generator().manual_seed(batch))


@pytest.mark.parametrize(
    "form", [resfx.DeltaAttention(), resfx.MultiGate(streams=2), resfx.Review()], ids=lambda f: f.name
)
def test_warm(form: resfx.Form) -> None:
    model = ClassAttention().double().eval()
    result = resfx.rewrite(model, form, (x().double(),), warm_start=True)
    assert [len(stream.sites) for stream in result.residual_map.streams] == [2]
    assert torch.allclose(result(x(7).double()), model(x(7).double()), rtol=0, atol=1e-12)


def test_the_merged_value_is_normed_in_its_part() -> None:
    """Attention residuals by hand, both queries away from zero."""
    model = ClassAttention().double().eval()
    result = resfx.rewrite(model, resfx.AttentionResidual(), (x().double(),))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in result.named_parameters():
            if name.startswith("residual."):
                parameter.copy_(torch.randn(D, generator=generator, dtype=torch.float64))
    weights = dict(result.named_parameters())

    def mix(owner: str, sources: list[Tensor]) -> Tensor:
        query, gain = weights[f"residual.0.{owner}.query"], weights[f"residual.0.{owner}.key_norm"]
        rms = [v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) for v in sources]
        logits = torch.stack([(r * gain * query).sum(-1) for r in rms])
        return (logits.softmax(0).unsqueeze(-1) * torch.stack(sources)).sum(0)

    value = x(7).double()
    h0 = value.tanh()
    first = model.f(h0)
    second = model.g(model.transition(mix("1", [h0, first])))
    want = mix("final", [h0, first, second])
    assert torch.allclose(result(value), want, rtol=0, atol=1e-12)
