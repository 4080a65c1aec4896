"""One process of the DDP test: `python live_ddp.py RANK FOLDER`. Writes the gradients of its step."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import live_toys
import torch
import torch.distributed as dist
from live_helpers import perturb
from torch.nn.parallel import DistributedDataParallel

import resfx

BATCH = 4


def data() -> torch.Tensor:
    """The whole batch; each process takes its half."""
    return live_toys.inputs(BATCH)


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=2)
    model = live_toys.model(depth=4)
    resfx.attach(model, resfx.DeltaAttention(), (live_toys.inputs(),), backend="eager")
    perturb(model)
    # Buckets of a few parameters: Dynamo's own way with DDP would cut the graph at each.
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.0005)
    half = data()[rank * 2 : rank * 2 + 2]
    for _ in range(3):  # DDP changes its buckets after the first step
        model.zero_grad()
        parallel(half).square().mean().backward()
    torch.save({name: p.grad for name, p in model.named_parameters()}, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
