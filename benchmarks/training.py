"""One small experiment per claim of the papers: `python benchmarks/training.py [--steps 300] [--out benchmarks/TRAINING.md]`.

A character GPT (see `training_model.py`) learns the standard library's Python files. Every run has the same batches in the
same order and the same number of steps, and the same weights at the start; the forms alone differ. The sentences above the
tables are computed from them: nothing is written down beforehand. One CPU core, about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from training_model import BATCH, CONTEXT, HEADS, WIDTH, Corpus, Trained, readings, standard_library, train

import resfx

LAYERS, LR = 6, 3e-3
LOOP_LAYERS, LOOP_LR = 1, 1e-2  # the best of 0.003, 0.01 and 0.03 for N = 1
LOOPS = (1, 2, 4, 8, 16, 32)
SEEDS = (0, 1, 2)  # of the plain model alone: how far apart runs are that differ by chance
WINDOW = 20  # a point of a loss curve is the mean over so many steps


@dataclass
class Section:
    """One claim: what was seen, in words with the numbers in them, and the table."""

    title: str
    header: list[str]
    rows: list[list[str]] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def table(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for number, heading in enumerate(self.header):
            table.add_column(heading, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        lines = [f"## {self.title}", "", *(f"- {line}" for line in self.seen), ""]
        lines += [_row(self.header), _row(["---", *["---:"] * (len(self.header) - 1)]), *map(_row, self.rows)]
        return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def losses(plain: list[Trained], routed: dict[str, Trained]) -> Section:
    """Plain, DeltaAttention, AttentionResidual and the others: the loss curves."""
    runs = {"plain": plain[0], **routed}
    section = Section("Loss by step: one curve per form", ["steps", *runs])
    steps = len(plain[0].losses)
    for end in sorted({max(1, steps * part // 6) for part in range(1, 7)}):
        window = slice(max(0, end - WINDOW), end)
        section.rows.append([str(end), *(f"{statistics.mean(run.losses[window]):.3f}" for run in runs.values())])
    section.rows.append(["held-out files", *(f"{run.validation:.3f}" for run in runs.values())])
    spread = [run.validation for run in plain]
    section.seen.append(
        f"Held out, the plain model ends between {min(spread):.3f} and {max(spread):.3f} over {len(spread)} seeds "
        f"(a range of {max(spread) - min(spread):.3f}): smaller differences may be chance."
    )
    for name, run in routed.items():
        gap = run.validation - plain[0].validation
        verdict = "inside the range of the seeds" if abs(gap) <= max(spread) - min(spread) else "outside of it"
        section.seen.append(f"{name}: {gap:+.3f} against plain with the same seed, {verdict}.")
    return section


def routing(delta: Trained, attention: Trained, corpus: Corpus) -> Section:
    """The mean maximum routing weight of DeltaAttention against AttentionResidual, by depth."""
    section = Section(
        "Maximum routing weight by depth, mean over tokens", ["site", "delta", "attention_residual", "1 / sources"]
    )
    ours, theirs = readings(delta, corpus), {reading.site: reading for reading in readings(attention, corpus)}
    means: dict[str, list[float]] = {"delta": [], "attention_residual": [], "uniform": []}
    for reading in ours:
        other = theirs[reading.site]
        if reading.weight_max is None or other.weight_max is None or reading.sources is None:
            continue
        values = [reading.weight_max, other.weight_max, 1 / reading.sources]
        section.rows.append([str(reading.site), *(f"{value:.3f}" for value in values)])
        for name, value in zip(means, values, strict=True):
            means[name].append(value)
    average = {name: statistics.mean(values) for name, values in means.items()}
    section.rows.append(["mean", *(f"{value:.3f}" for value in average.values())])
    sharper = max(("delta", "attention_residual"), key=average.__getitem__)
    section.seen.append(
        f"Mean over the sites: delta {average['delta']:.3f}, attention_residual {average['attention_residual']:.3f}, "
        f"equal weights {average['uniform']:.3f}. {sharper} routes more sharply here."
    )
    return section


def norms(plain: Trained, gated: Trained, corpus: Corpus) -> Section:
    """The norm of the state by depth, MultiGate against plain."""
    section = Section(
        "Norm of the state before every update, root mean square over tokens", ["site", "plain", "multi_gate"]
    )
    pairs = zip(_numbers(plain, corpus, "stream_norm"), _numbers(gated, corpus, "stream_norm"), strict=True)
    values = [(a, b) for a, b in pairs if a is not None and b is not None]
    section.rows = [[str(site), f"{a:.2f}", f"{b:.2f}"] for site, (a, b) in enumerate(values)]
    first, last = values[0], values[-1]
    section.seen.append(
        f"From the first update to the last the norm changes by a factor of {last[0] / first[0]:.2f} in the plain model, "
        f"of {last[1] / first[1]:.2f} under MultiGate."
    )
    return section


def gates(reviewed: Trained, corpus: Corpus) -> Section:
    """Review's mean gate by depth; it starts at 0.5 everywhere."""
    section = Section(
        "Review: mean gate by depth (0.5 at the start)", ["site", "branch", "gate", "gate x update / state"]
    )
    taken: dict[str, list[float]] = {"attention": [], "mlp": []}
    for reading in readings(reviewed, corpus):
        if reading.gate_mean is None or reading.update_norm is None or reading.stream_norm is None:
            continue
        branch = list(taken)[len(section.rows) % 2]
        share = reading.gate_mean * reading.update_norm / reading.stream_norm
        section.rows.append([str(reading.site), branch, f"{reading.gate_mean:.3f}", f"{share:.3f}"])
        taken[branch].append(reading.gate_mean)
    for branch, values in taken.items():
        section.seen.append(
            f"{branch}: {values[0]:.3f} in the first layer, {values[-1]:.3f} in the last, mean {statistics.mean(values):.3f}."
        )
    return section


def loops(run: Callable[[resfx.Form], Trained]) -> Section:
    """The loss against the number of loops, e = 1/N against 1/sqrt(N), at one learning rate."""
    section = Section(
        f"Loss against loops over {LOOP_LAYERS} layer, at one learning rate",
        ["N", "1/N: training", "1/N: held out", "1/sqrt(N): training", "1/sqrt(N): held out"],
    )
    held: dict[str, list[float]] = {"1/N": [], "1/sqrt(N)": []}
    for count in LOOPS:
        row = [str(count)]
        for name, lam in (("1/N", 1.0), ("1/sqrt(N)", math.sqrt(count))):
            trained = run(resfx.ScaledLoop(lam=lam, loops=count))
            held[name].append(trained.validation)
            row += [f"{statistics.mean(trained.losses[-WINDOW:]):.3f}", f"{trained.validation:.3f}"]
        section.rows.append(row)
    for name, values in held.items():
        section.seen.append(
            f"{name}: held out {values[0]:.3f} at N = {LOOPS[0]} and {values[-1]:.3f} at N = {LOOPS[-1]} "
            f"({values[-1] - values[0]:+.3f}); best {min(values):.3f}, worst {max(values):.3f}."
        )
    return section


def _numbers(trained: Trained, corpus: Corpus, quantity: str) -> list[float | None]:
    return [getattr(reading, quantity) for reading in readings(trained, corpus) if isinstance(reading.site, int)]


def preamble(steps: int, corpus: Corpus, minutes: float) -> str:
    """What a reader needs to repeat the run."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()} (whose standard library is the text)"
    size = f"{WIDTH} wide, {HEADS} heads, {LAYERS} layers ({2 * LAYERS} sites)"
    return f"""# Training curves

Written by `OMP_NUM_THREADS=1 python benchmarks/training.py --steps {steps}`
on {datetime.now(UTC):%Y-%m-%d}: {versions}, {platform.machine()}, one core, {minutes:.0f} CPU minutes.

A pre-norm character GPT, {size}, on the {len(corpus.training):,} characters of the
standard library's top-level modules, every tenth file held out. {steps} steps of {BATCH} x {CONTEXT} characters, AdamW by
`resfx.parameter_groups` at {LR:g} (no other tuning, for any form), seed 0, the same start and batches in every run.
Losses are cross entropy in nats per character. The loop runs have {LOOP_LAYERS} layer, at {LOOP_LR:g}, under `ScaledLoop(loops=N)`
(e = 1/(N sqrt(2))) and `ScaledLoop(lam=sqrt(N), loops=N)` (e = 1/sqrt(2 N)).

So small and so short a run shows how a form behaves, not how good it is at scale.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="training steps of every run")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("TRAINING.md"), help="where the tables go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, corpus, begin = Console(), standard_library(), time.process_time()

    def run(form: resfx.Form, seed: int = 0, layers: int = LAYERS, lr: float = LR) -> Trained:
        start = time.process_time()
        trained = train(form, corpus, layers=layers, steps=options.steps, lr=lr, seed=seed)
        seconds = time.process_time() - start
        console.print(
            f"{form.to_spec()}, seed {seed}: held out {trained.validation:.3f}, {seconds:.0f} s", markup=False
        )
        return trained

    plain = [run(resfx.Standard(), seed) for seed in SEEDS]
    forms = (resfx.DeltaAttention(), resfx.AttentionResidual(), resfx.MultiGate(), resfx.Review())
    other = {form.name: run(form) for form in forms}
    sections = [
        losses(plain, other),
        routing(other["delta"], other["attention_residual"], corpus),
        norms(plain[0], other["multi_gate"], corpus),
        gates(other["review"], corpus),
        loops(lambda form: run(form, layers=LOOP_LAYERS, lr=LOOP_LR)),
    ]
    for section in sections:
        console.print(section.table())
        console.print("\n".join(section.seen), markup=False)
    minutes = (time.process_time() - begin) / 60
    text = "\n\n".join([preamble(options.steps, corpus, minutes).rstrip(), *(s.markdown() for s in sections)])
    options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
