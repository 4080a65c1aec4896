"""What each form costs on a CPU: `python benchmarks/cpu.py [NAME ..] [--only MODE ..] [--sublayers N] [--threads N] [--out FILE]`.

The reference net (`reference_net.py`), 48 sublayers, D 256, 4 x 256 tokens, float32, compiled by Inductor: time over the plain net's, for
inference, for a step of training (forward and backward) and for an AOTInductor package; and Inductor's kernels. The nets take turns, round
by round, in one process; a time is the median round's. `--processor` measures processor time, where others are at work on the machine: set
OMP_WAIT_POLICY=passive, for a thread that waits in a loop counts as one that works. Compiling takes minutes a net the first time, and is
kept in Inductor's cache.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from reference_net import Published, ReferenceNet, forms
from reporting import put_section, seconds, table
from rich.console import Console
from torch import Tensor, nn

import resfx
from resfx.passes.form import Form

MODES = ("inference", "training", "package")


@dataclass(frozen=True)
class Size:
    """The net's size and the input's."""

    sublayers: int
    width: int
    batch: int
    tokens: int

    def example(self) -> Tensor:
        return torch.randn(self.batch, self.tokens, self.width)


@dataclass(frozen=True)
class Runner:
    """One net in one mode: what runs it once, and what it cost to make."""

    run: Callable[[], object]
    kernels: int
    seconds: float


def nets(size: Size) -> dict[str, Callable[[], nn.Module]]:
    """What builds each line's net, by its name."""
    block = max(size.sublayers // 4, 1)
    return {
        "plain": partial(ReferenceNet, size.sublayers, size.width),
        "published delta": partial(Published, size.sublayers, size.width),
        "published delta, 4 blocks": partial(Published, size.sublayers, size.width, block_size=block),
        **{name: partial(_rewritten, form, size) for name, form in forms(size.sublayers).items()},
    }


def _rewritten(form: Form, size: Size) -> nn.Module:
    net = ReferenceNet(size.sublayers, size.width)
    return resfx.rewrite(net, form, (torch.randn(2, 8, size.width),))


def runner(build: Callable[[], nn.Module], mode: str, size: Size, folder: Path) -> Runner:
    """The net, compiled for `mode` and run once."""
    torch.manual_seed(0)
    torch.compiler.reset()
    net, x = build(), size.example()
    kernels, started = _kernels(), time.process_time()
    run = {"inference": _inference, "training": _training, "package": partial(_package, folder)}[mode](net, x)
    run()
    return Runner(run, _kernels() - kernels, time.process_time() - started)


def _inference(net: nn.Module, x: Tensor) -> Callable[[], object]:
    compiled = torch.compile(net.eval())

    def run() -> object:
        with torch.no_grad():
            return compiled(x)

    return run


def _training(net: nn.Module, x: Tensor) -> Callable[[], object]:
    compiled = torch.compile(net)
    weight = torch.randn_like(x)

    def run() -> object:
        net.zero_grad(set_to_none=True)
        return (compiled(x) * weight).sum().backward()

    return run


def _package(folder: Path, net: nn.Module, x: Tensor) -> Callable[[], object]:
    path = folder / f"{len(list(folder.iterdir()))}.pt2"
    resfx.export.to_aoti(net, path, (x,), check=False)
    loaded = resfx.export.load_aoti(path)
    return lambda: loaded(x)


def _kernels() -> int:
    """How many kernels Inductor has made in this process; it has no public counter."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)


def measured(
    names: list[str],
    modes: list[str],
    size: Size,
    rounds: int,
    clock: Callable[[], float],
    tell: Callable[[str], None],
) -> str:
    """Each line's time over the plain net's, its kernels and its compile time; `tell` hears of each step."""
    known = nets(size)
    cells: dict[str, list[str]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for mode in modes:
            made: dict[str, Runner] = {}
            for name in names:
                made[name] = runner(known[name], mode, size, Path(folder))
                tell(f"{mode}: {name}: {made[name].kernels} kernels, {made[name].seconds:.0f} s to compile")
            times = seconds({name: one.run for name, one in made.items()}, rounds, clock)
            for name, one in made.items():
                ratio = times[name] / times["plain"]
                tell(f"{mode}: {name}: {1000 * times[name]:.2f} ms, {ratio:.3f} x plain")
                cells[name].append(f"{ratio:.2f} ({one.kernels} kernels, {one.seconds:.0f} s)")
    return table(["net", *modes], [[name, *cells[name]] for name in names])


def put(path: Path, found: str, size: Size, threads: int) -> None:
    """The table with what it is of, as a section of the file."""
    text = f"""The reference net, {size.sublayers} pre-norm sublayers, D {size.width}, {size.batch} x {size.tokens} tokens, float32,
compiled by Inductor, {threads} threads. Time over the plain net's in the same mode; in brackets the kernels Inductor made and the
processor time of compiling.

{found}"""
    put_section(path, "On a CPU", "python benchmarks/cpu.py", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="lines; all if none is given. plain always runs")
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--sublayers", type=int, default=48)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--processor", action="store_true", help="processor time in place of the clock's")
    parser.add_argument("--out", type=Path, help="the file whose section is written; none if it isn't given")
    options = parser.parse_args()
    size = Size(options.sublayers, options.width, options.batch, options.tokens)
    known = nets(size)
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"no line named {', '.join(unknown)}; there are {', '.join(known)}")
    names = ["plain", *(name for name in options.names or known if name != "plain")]
    torch.set_num_threads(options.threads)
    console = Console(soft_wrap=True, stderr=True)
    clock = time.process_time if options.processor else time.perf_counter
    found = measured(
        names, options.only, size, options.rounds, clock, partial(console.print, markup=False, highlight=False)
    )
    Console(soft_wrap=True).print(found, markup=False, highlight=False)
    if options.out is not None:
        put(options.out, found, size, options.threads)


if __name__ == "__main__":
    main()
