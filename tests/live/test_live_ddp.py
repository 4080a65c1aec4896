"""Two gloo processes under DistributedDataParallel have the gradients of one process with the whole batch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import live_ddp
import live_toys
import pytest
import torch
from live_helpers import assert_close, perturb

import resfx


@pytest.mark.slow
def test_gradients_of_two_processes(tmp_path: Path) -> None:
    commands = [[sys.executable, live_ddp.__file__, str(rank), str(tmp_path)] for rank in range(2)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
    model = resfx.rewrite(live_toys.model(depth=4), resfx.DeltaAttention(), (live_toys.inputs(),))
    perturb(model)
    model(live_ddp.data()).square().mean().backward()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, parameter in model.named_parameters():
        assert torch.equal(first[name], second[name])
        assert parameter.grad is not None
        assert_close([first[name]], [parameter.grad])
