"""Dropout on the state itself: a rewrite that copies this stretch of the stream draws one mask, as the model did."""

from __future__ import annotations

import pytest
import torch
from new_parameters import perturb
from torch import Tensor, nn
from torch.nn import functional as F

import resfx

FORMS = [resfx.MultiGate(), resfx.AttentionResidual(), resfx.DeltaAttention(), resfx.Review()]


class Net(nn.Module):
    """x <- dropout(x + f(x)), with dropout in the branches too; the state between is an output."""

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.maps, self.drop, self.functional = (
            nn.ModuleList(nn.Linear(8, 8) for _ in range(4)),
            nn.Dropout(0.3),
            functional,
        )

    def dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3, self.training) if self.functional else self.drop(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = x
        for k, linear in enumerate(self.maps):
            x = self.dropped(x + self.dropped(torch.tanh(linear(x))))
            seen = x if k == 1 else seen
        return x, seen


def run(model: nn.Module, x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The outputs in train mode and the state of the generator after them."""
    torch.manual_seed(1)
    return model.train()(x), torch.get_rng_state()


@pytest.mark.parametrize("frontend", ["export", "fx"])
@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_warm_start_is_the_model_in_train_mode(form: resfx.Form, functional: bool, frontend: str) -> None:
    if frontend == "fx" and functional:
        pytest.skip("torch.fx takes the mode of the trace for good")
    torch.manual_seed(0)
    net, x = Net(functional), torch.randn(2, 5, 8)
    result = resfx.rewrite(net, form, (x,), warm_start=True, frontend=frontend)
    (got, after), (want, expected) = run(result, x), run(net, x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(after, expected)
    assert all(torch.equal(a, b) for a, b in zip(result.eval()(x), net.eval()(x), strict=True))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_as_many_draws_as_the_model_s(form: resfx.Form) -> None:
    torch.manual_seed(0)
    net, x = Net(), torch.randn(2, 5, 8)
    result = resfx.rewrite(net, form, (x,))
    perturb(result)
    assert torch.equal(run(result, x)[1], run(net, x)[1])


def test_the_branch_and_the_output_see_one_mask() -> None:
    """AttentionResidual has no state: what a branch and an output read of it are dropped together."""
    torch.manual_seed(0)
    net, x = Net(), torch.randn(64, 5, 8)
    result = resfx.rewrite(net, resfx.AttentionResidual(), (x,))
    perturb(result)
    read: list[Tensor] = []
    result.maps[2].register_forward_pre_hook(lambda module, args: read.append(args[0]))
    _, seen = run(result, x)[0]
    assert read
    assert 0.2 < (seen == 0).float().mean() < 0.4
    assert torch.equal(read[0] == 0, seen == 0)
