"""A rewrite on the meta device: the new parameters are created there, and get their start once the model has memory."""

from __future__ import annotations

import pytest
import torch
from checkpoint_models import Block
from torch import nn

import resfx

FORMS = [
    resfx.DeltaAttention(gate="scalar", query_init_std=0.02),
    resfx.MultiGate(streams=2),
    resfx.ScaledLoop(learnable=True),
]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(8) for _ in range(4))).eval()


def rewritten(plain: nn.Module, form: resfx.Form, warm: bool) -> resfx.Rewritten:
    device = next(plain.parameters()).device
    x = torch.ones(2, 5, 8, device=device)
    return resfx.rewrite(plain, form, (x,), warm_start=warm)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_what_to_empty_leaves_without_numbers_gets_its_start(form: resfx.Form, warm: bool) -> None:
    plain = model()
    torch.manual_seed(1)
    expected = rewritten(plain, form, warm).state_dict()
    made = rewritten(model().to("meta"), form, warm)
    new = [name for name, value in made.named_parameters() if value.is_meta and name.startswith("residual.")]
    assert new
    assert new == [name for name in expected if name.startswith("residual.")]
    made.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(7.0)  # whatever was in the memory
    missing, unexpected = made.load_state_dict(plain.state_dict(), strict=False)
    assert (missing, unexpected) == (new, [])
    torch.manual_seed(1)
    for tree in made.residual.modules():
        tree.reset_parameters()  # type: ignore[operator]
    for name, value in made.state_dict().items():
        assert torch.equal(value, expected[name]), name
