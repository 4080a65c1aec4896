"""The parameters that a rewrite adds, and how to move them away from a start that hides errors."""

from __future__ import annotations

import torch
from torch import nn


def new_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name.startswith("residual.")}


@torch.no_grad()
def perturb(model: nn.Module) -> None:
    """Every element away from its start by 0.2 to 0.5, either way: a zero query reads nothing, a zero gate hides all."""
    generator = torch.Generator().manual_seed(3)
    for parameter in new_parameters(model).values():
        size = 0.2 + 0.3 * torch.rand(parameter.shape, generator=generator)
        parameter += torch.where(torch.rand(parameter.shape, generator=generator) < 0.5, size, -size)
