"""What the forms cost on a real GPU: `python benchmarks/gpu.py [--minutes 8] [--out FILE]`; `--dry` runs every line small, on the CPU.

First the numbers: every form, compiled, in float32 and bfloat16, against the same net in float64 without a compiler. Then the times: plain,
published and every form under torch.compile, forward and forward + backward, with the bytes that Inductor counts for them over the time
they took, as a share of the bandwidth that a copy reaches on the same card. What the time limit cuts off is listed as not run.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")  # a cached graph isn't counted

import torch
from gpu_block import FLASH, FlashBlock
from lowering import nets
from reference_net import with_memory
from rich.console import Console
from torch import Tensor, nn

HEADER = "| D | sublayers | net | forward ms | x plain | forward + backward ms | x plain | forward GB/s | share of a copy | compile s |"


@dataclass(frozen=True)
class Setting:
    """One run of the script: where, how large, how long."""

    device: str
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    batch: int
    tokens: int
    exact: tuple[int, int]  # sublayers and width of the nets whose numbers are compared
    backend: str
    until: float

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.until


REAL = {
    "device": "cuda",
    "widths": (2048, 4096),
    "depths": (24, 48),
    "batch": 8,
    "tokens": 2048,
    "exact": (12, 256),
    "backend": "inductor",
}
DRY = {
    "device": "cpu",
    "widths": (16,),
    "depths": (4,),
    "batch": 2,
    "tokens": 8,
    "exact": (4, 16),
    "backend": "aot_eager",
}


def known(sublayers: int, width: int) -> dict[str, Callable[[], nn.Module]]:
    """Every net by its name, without memory."""
    found = dict(nets(sublayers, width))
    if FLASH is not None:
        found["flash-attn-res, 4 blocks"] = lambda: FlashBlock(sublayers, width, max(sublayers // 4, 1)).bfloat16()
    return found


def filled(net: nn.Module, device: str, dtype: torch.dtype) -> nn.Module:
    """`net` with memory and values: matrices as a linear layer starts, vectors near what they were made with, none of them uniform."""
    torch.manual_seed(0)
    with torch.device(device):
        with_memory(net)
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.1)
    return net.to(dtype)


def gradients(net: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and the gradients of its mean square by every parameter."""
    net.zero_grad()
    y = call(x)
    y.square().mean(dtype=torch.float64).backward()
    return y.detach(), [p.grad.detach().clone() for p in net.parameters() if p.grad is not None]


def deviation(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def exactness(setting: Setting, console: Console) -> None:
    """Relative deviation from float64: output, and the worst gradient."""
    console.print(
        "\n| net | float32 output | gradient | bfloat16 output | gradient |\n| --- | --- | --- | --- | --- |",
        markup=False,
    )
    x = torch.randn(2, 64, setting.exact[1], device=setting.device, dtype=torch.float64)
    for name, build in nets(*setting.exact).items():
        net = filled(build(), setting.device, torch.float64)
        state = net.state_dict()
        cells = []
        for dtype in (torch.float32, torch.bfloat16):
            # What is compared is the arithmetic: both start from the same rounded numbers.
            net = net.to(dtype)
            net.load_state_dict(state)
            rounded = x.to(dtype)
            got, slopes = gradients(net, torch.compile(net, backend=setting.backend, dynamic=False), rounded)
            net = net.to(torch.float64)
            want, exact = gradients(net, net, rounded.double())
            worst = max(deviation(a, b) for a, b in zip(slopes, exact, strict=True))
            cells += [f"{deviation(got, want):.1e}", f"{worst:.1e}"]
            torch._dynamo.reset()
        console.print(f"| {name} | {' | '.join(cells)} |", markup=False, highlight=False)


def milliseconds(setting: Setting, call: Callable[[], object]) -> float:
    """The median time of `call`, after it has run."""
    if setting.device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(call, warmup=50, rep=200, return_mode="median"))
    started = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - started)


def copy_bandwidth(setting: Setting) -> float:
    """GB/s of a copy, read and written."""
    source = torch.empty(2**29 if setting.device == "cuda" else 2**20, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / 1e6 / milliseconds(setting, lambda: target.copy_(source))


@dataclass(frozen=True)
class Time:
    forward: float
    both: float
    gigabytes: float  # of the forward, by Inductor's count
    compile_seconds: float


def timed(setting: Setting, build: Callable[[], nn.Module], width: int) -> Time:
    net = filled(build(), setting.device, torch.bfloat16)
    x = torch.randn(setting.batch, setting.tokens, width, device=setting.device, dtype=torch.bfloat16)
    metrics = torch._inductor.metrics
    torch._dynamo.reset()
    metrics.reset()
    started = time.monotonic()
    compiled = torch.compile(net, backend=setting.backend, dynamic=False)
    with torch.no_grad():
        compiled(x)
        gigabytes = metrics.num_bytes_accessed / 1e9
        forward = milliseconds(setting, lambda: compiled(x))
    ones = torch.ones_like(x)

    def both() -> None:
        compiled(x).backward(ones)

    both()
    seconds = time.monotonic() - started
    return Time(forward, milliseconds(setting, both), gigabytes, seconds)


def rows(setting: Setting, console: Console) -> Iterator[str]:
    """The lines of the table, printed as they come."""
    bandwidth = copy_bandwidth(setting)
    console.print(f"\na copy reaches {bandwidth:.0f} GB/s\n\n{HEADER}\n|{' --- |' * 10}", markup=False, highlight=False)
    for width in setting.widths:
        for depth in setting.depths:
            plain = None
            for name, build in known(depth, width).items():
                if setting.is_over:
                    yield f"| {width} | {depth} | {name} | not run: the time limit |"
                    continue
                try:
                    result = timed(setting, build, width)
                except torch.OutOfMemoryError:
                    yield f"| {width} | {depth} | {name} | not run: out of memory |"
                    continue
                plain = plain or result
                rate = result.gigabytes / result.forward * 1e3
                yield (
                    f"| {width} | {depth} | {name} | {result.forward:.2f} | {result.forward / plain.forward:.2f} | {result.both:.2f}"
                    f" | {result.both / plain.both:.2f} | {rate:.0f} | {rate / bandwidth:.2f} | {result.compile_seconds:.0f} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="what hasn't begun by then isn't run")
    parser.add_argument(
        "--dry",
        action="store_true",
        help="every line once, tiny, on the CPU and without Inductor: a check of the script",
    )
    parser.add_argument("--out", type=Path, help="where the tables go as well")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --dry checks the script without one")
    setting = Setting(**(DRY if options.dry else REAL), until=time.monotonic() + 60 * options.minutes)
    torch._logging.set_logs(inductor_metrics=not options.dry)  # Inductor counts bytes only for its log
    console = Console(record=True, soft_wrap=True)
    where = torch.cuda.get_device_name() if setting.device == "cuda" else "CPU, dry: the times mean nothing"
    console.print(f"torch {torch.__version__} on {where}", markup=False, highlight=False)
    if FLASH is None:
        console.print("flash-attn-res isn't installed: its line is left out", markup=False)
    exactness(setting, console)
    for row in rows(setting, console):
        console.print(row, markup=False, highlight=False)
    if options.out is not None:
        options.out.write_text(console.export_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
