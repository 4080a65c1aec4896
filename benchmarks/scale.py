"""What size costs: `python benchmarks/scale.py [--layers N] [--llama]`.

A pre-norm stack of N layers (2 N sites; 1,000 by default, for which torch.export alone takes minutes) is searched, and rewritten into
block Delta and MultiGate. `--llama`: the transformers library's 7B configuration instead, on the meta device, capture included.
Seconds are of processor time; captures of the stack are timed apart, for torch.export has most of them. Memory is the growth of the peak.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import resfx
from resfx.capture import capture
from resfx.patterns import search

FORMS = (resfx.DeltaAttention(granularity="block", block_size=8), resfx.MultiGate())
D, HEADS = 16, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D // HEADS)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed: Tensor = self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(D), Attention(), nn.LayerNorm(D)
        self.mlp = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Clock:
    """Adds up what the calls of a module's functions take."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.seconds = 0.0
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.process_time() - start

        return run


def peak() -> float:
    """The most memory that the process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def row(name: str, work: Callable[[], Any], clock: Clock | None = None) -> Any:
    """Do `work`, print a line of the table, and return the result. What `clock` counts is a column of its own."""
    before, memory = clock.seconds if clock else 0.0, peak()
    start = time.process_time()
    result = work()
    total = time.process_time() - start
    apart = (clock.seconds if clock else 0.0) - before
    print(f"{name:34} {apart:9.1f} {total - apart:9.1f} {peak() - memory:10,.0f}", flush=True)
    return result


def stack(layers: int) -> None:
    """Find and rewrite a stack of `layers`."""
    model, x = nn.Sequential(*(Block() for _ in range(layers))).eval(), torch.randn(2, 5, D)
    # The first capture, the second one with the leaves folded, and the comparison of its numbers with the model's.
    captures = Clock(sys.modules["resfx.rewrite"], "capture", "capture_folded", "verify_capture")
    print(f"{layers:,} layers, {2 * layers:,} sites")
    graph = capture(model, (x,)).graph_module
    row("find", lambda: search(graph))
    for form in FORMS:
        row(form.to_spec(), lambda form=form: resfx.rewrite(model, form, (x,)), captures)  # type: ignore[misc]


def llama() -> None:
    """Rewrite the 7B configuration on the meta device."""
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig()).eval()
        ids = torch.zeros(2, 16, dtype=torch.int64)
    size = sum(p.numel() for p in model.parameters()) / 1e9
    print(f"Llama, {size:.1f}B parameters, capture included")
    for form in FORMS:
        result = row(form.to_spec(), lambda form=form: resfx.rewrite(model, form, (ids,)))  # type: ignore[misc]
        new = [p for name, p in result.named_parameters() if name.startswith("residual.")]
        assert new
        assert all(p.is_meta for p in new)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the rewrite of large models.")
    parser.add_argument("--layers", type=int, default=1000, help="of the stack")
    parser.add_argument("--llama", action="store_true", help="a 7B model on the meta device instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one core")
    print(f"{'':34} {'capture s':>9} {'rest s':>9} {'MB':>10}")
    if options.llama:
        llama()
    else:
        stack(options.layers)


if __name__ == "__main__":
    main()
