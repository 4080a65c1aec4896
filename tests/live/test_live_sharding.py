"""shard_units: the leaves of each block, and fully_shard over them in two gloo processes."""

from __future__ import annotations

from pathlib import Path

import live_fsdp
import live_toys
import pytest
import torch
from live_helpers import assert_close, perturb, run_two_processes

import resfx


def rewritten() -> resfx.Rewritten:
    model = resfx.rewrite(live_toys.model(), resfx.DeltaAttention(), (live_toys.inputs(),))
    perturb(model)
    return model


def test_the_leaves_of_each_block() -> None:
    model = rewritten()
    names = {id(module): name for name, module in model.named_modules()}
    units = [[names[id(module)] for module in unit] for unit in resfx.shard_units(model)]
    leaves = ("norm1", "a", "norm2", "b")
    assert units == [[f"stack.layers.{number}.{leaf}" for leaf in leaves] for number in range(2)]
    with pytest.raises(resfx.NotRewritten, match="sharded"):
        resfx.shard_units(live_toys.model())


@pytest.mark.slow
def test_fully_shard_over_the_units(tmp_path: Path) -> None:
    run_two_processes(live_fsdp.__file__, tmp_path)
    model = rewritten()
    output = model(live_toys.inputs(4))
    output.square().mean().backward()
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert_close([torch.cat([part for part, _ in saved])], [output])
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close([saved[0][1][name]], [parameter.grad])
