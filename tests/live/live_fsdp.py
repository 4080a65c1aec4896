"""One process of the FSDP2 test: `python live_fsdp.py RANK FOLDER MODE`. Writes its output and the gathered gradients.

MODE: `static` shards a rewritten model block by block, `live` an attached one as a whole.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import live_toys
import torch
import torch.distributed as dist
from live_helpers import perturb
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import resfx


def sharded(mode: str) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    model: nn.Module = live_toys.model()
    if mode == "static":
        model = resfx.rewrite(model, resfx.DeltaAttention(), (live_toys.inputs(),))
    else:
        resfx.attach(model, resfx.DeltaAttention(), (live_toys.inputs(),), backend="aot_eager")
    perturb(model)
    for unit in resfx.shard_units(model) if mode == "static" else []:
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def main(rank: int, folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    model = sharded(mode)
    half = live_toys.inputs(4)[rank * 2 : rank * 2 + 2]
    for _ in range(2):
        model.zero_grad()
        output = model(half)
        output.square().mean().backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters() if p.grad is not None}
    torch.save((output.detach(), gradients), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
