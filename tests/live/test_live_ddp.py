"""Two gloo processes under DistributedDataParallel have the gradients of one process with the whole batch."""

from __future__ import annotations

from pathlib import Path

import live_ddp
import live_toys
import pytest
import torch
from live_helpers import assert_close, perturb, run_two_processes

import resfx


@pytest.mark.slow
def test_gradients_of_two_processes(tmp_path: Path) -> None:
    run_two_processes(live_ddp.__file__, tmp_path)
    model = resfx.rewrite(live_toys.model(depth=4), resfx.DeltaAttention(), (live_toys.inputs(),))
    perturb(model)
    model(live_ddp.data()).square().mean().backward()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, parameter in model.named_parameters():
        assert torch.equal(first[name], second[name])
        assert parameter.grad is not None
        assert_close([first[name]], [parameter.grad])
