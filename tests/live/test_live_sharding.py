"""shard_units: the leaves of each block, and fully_shard over them, or over an attached model, in two gloo processes."""

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


def test_an_attached_model_is_one_unit() -> None:
    live = live_toys.model()
    resfx.attach(live, resfx.DeltaAttention(), (live_toys.inputs(),), backend="eager")
    with pytest.raises(resfx.NotRewritten, match=r"fully_shard\(model\) alone"):
        resfx.shard_units(live)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["static", "live"])
def test_fully_shard(mode: str, tmp_path: Path) -> None:
    run_two_processes(live_fsdp.__file__, tmp_path, mode)
    model = rewritten()
    output = model(live_toys.inputs(4))
    output.square().mean().backward()
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert_close([torch.cat([part for part, _ in saved])], [output])
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert_close([saved[0][1][name]], [parameter.grad])
