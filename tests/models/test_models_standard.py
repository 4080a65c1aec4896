"""The plain residual by the same road: the model itself, bit for bit, in eval and train mode, buffers included.

A decoder is compared with its cache off, as it is captured: a key that went through the cache lies in memory in another
order, and attention with dropout on it rounds differently (3e-7).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models_steps import equal, loss_of, outputs, run
from models_zoo import ZOO, Entry
from new_parameters import new_parameters
from torch import nn

import resfx
from resfx.libraries import without_cache

_DEFAULT = {"torchvision_resnet18"}  # BatchNorm in train mode
NAMES = [pytest.param(name, marks=[] if ZOO[name].small or name in _DEFAULT else [pytest.mark.slow]) for name in ZOO]


@pytest.mark.parametrize("name", NAMES)
def test_standard_is_the_model(name: str) -> None:
    entry = ZOO[name]
    model, args, kwargs = entry.build()
    result = resfx.rewrite(model, resfx.Standard(), args, kwargs)
    with without_cache(model):
        check_same(entry, model, result, args, kwargs)


def check_same(entry: Entry, model: nn.Module, result: nn.Module, args: Any, kwargs: Any) -> None:
    assert new_parameters(result) == {}
    assert list(dict(result.named_parameters())) == list(dict(model.named_parameters()))
    assert equal(outputs(result, args, kwargs), outputs(model, args, kwargs))

    other, other_kwargs = entry.inputs(3)
    plain, ours = model.train(), result.train()
    # The same random numbers in the same order: every dropout and stochastic depth is alive.
    assert equal(outputs(ours, other, other_kwargs, seed=7), outputs(plain, other, other_kwargs, seed=7))
    own = dict(plain.named_buffers())  # constants of the capture may join them, outside of the state_dict
    for (name_a, a), (name_b, b) in zip(
        own.items(), ((name, buffer) for name, buffer in ours.named_buffers() if name in own), strict=True
    ):
        assert name_a == name_b
        assert torch.equal(a, b), f"{name_a} was updated differently in train mode"

    torch.manual_seed(8)
    loss_of(run(plain, args, kwargs)).backward()
    torch.manual_seed(8)
    loss_of(run(ours, args, kwargs)).backward()
    for (name_a, p), (_, q) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name_a
        if p.grad is not None and q.grad is not None:
            assert float((p.grad - q.grad).norm()) <= 1e-6 * float(p.grad.norm()), name_a
