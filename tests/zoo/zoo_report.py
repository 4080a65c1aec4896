"""Writes docs/coverage.md from the lines of the sweep.

python tests/zoo/zoo_report.py docs/coverage.md results.jsonl [more.jsonl ..]
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from zoo_builders import ZOO
from zoo_sweep import read

Steps: TypeAlias = dict[str, dict[str, Any]]  # step -> result, of one model

STATUSES = ("pass", "refuse", "fail", "skip")
PACKAGES = ("torch", "transformers", "timm", "torchvision", "onnx", "onnxscript", "onnxruntime-gpu")
MEANING = {
    "capture": "`find` returns",
    "sites": "as many sites as the model's source has",
    "branches": "as many branches in all",
    "streams": "as many streams",
    "lines": "the sites are at the expected source lines",
    "rewrite": "`rewrite(.., warm_start=True)` returns, every stream rewritten",
    "names": "the `state_dict` keeps its names",
    "eval": "the output is the plain model's to 1e-5 (relative norm) in eval mode",
    "train": "and in train mode, with the same random numbers",
    "gradients": "every gradient is finite, the new parameters perturbed",
    "parameters": "each new parameter changes the output",
    "onnx": "ONNX export, checked in ONNX Runtime: of the plain model, then, where that passed, of the rewritten and perturbed one",
    "limit": "ran out of time or memory, or crashed, in the step after the last one that is listed",
}


def gather(files: Sequence[Path]) -> dict[str, Steps]:
    """Model -> its steps; of two lines for one model and group the later one counts."""
    models: dict[str, Steps] = defaultdict(dict)
    for (name, group), line in _lines(files).items():
        models[name].update({f"{group}.{s}" if s == "limit" else s: r for s, r in line["steps"].items()})
    return models


def _lines(files: Sequence[Path]) -> dict[tuple[str, str], dict[str, Any]]:
    return {key: line for file in files for key, line in read(file).items()}


def runs(files: Sequence[Path]) -> Iterator[str]:
    """How many models each group of steps was run on, at which commit."""
    found = Counter((group, line.get("commit", "unknown")) for (_, group), line in _lines(files).items())
    for group in dict.fromkeys(group for group, _ in found):
        parts = [f"{count} at {commit}" for (each, commit), count in found.most_common() if each == group]
        total = sum(count for (each, _), count in found.items() if each == group)
        yield f"- {group}: {total} of {len(ZOO)} models; {', '.join(parts)}"


def step_names(models: dict[str, Steps]) -> list[str]:
    """Every step that was run, in the order of first appearance."""
    return list(dict.fromkeys(step for steps in models.values() for step in steps))


def libraries() -> list[str]:
    return sorted({row["spec"]["library"] for row in ZOO.values()})


def counts(models: dict[str, Steps], step: str, library: str | None) -> Counter[str]:
    return Counter(
        steps[step]["status"]
        for name, steps in models.items()
        if step in steps and library in (None, ZOO[name]["spec"]["library"])
    )


def cell(found: Counter[str]) -> str:
    return " / ".join(str(found[status]) for status in STATUSES) if found else "-"


def table(models: dict[str, Steps]) -> Iterator[str]:
    names = libraries()
    yield f"| step | {' | '.join(names)} | all | passed |"
    yield f"| --- |{' --- |' * (len(names) + 2)}"
    for step in step_names(models):
        all_of = counts(models, step, None)
        cells = [cell(counts(models, step, library)) for library in names]
        judged = all_of.total() - all_of["skip"]
        share = f"{all_of['pass'] / judged:.1%}" if judged else "-"
        yield f"| {step} | {' | '.join(cells)} | {cell(all_of)} | {share} |"


def reason_class(result: dict[str, Any]) -> str:
    """The reason without what differs from model to model: names, numbers, places."""
    text = result["reason"].strip().splitlines()[0] if result["reason"].strip() else ""
    text = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"", "`..`", text)
    text = re.sub(r"/\S+", "..", text)
    text = re.sub(r"\d+(\.\d+)?(e[-+]?\d+)?", "#", text)
    return f"{result['class']}: {text[:140]}" if "class" in result else text[:140]


def classes(models: dict[str, Steps]) -> Iterator[str]:
    found: Counter[tuple[str, str, str]] = Counter()
    for steps in models.values():
        for step, result in steps.items():
            if result["status"] != "pass":
                found[step, result["status"], reason_class(result)] += 1
    yield "| models | step | status | reason |"
    yield "| --- | --- | --- | --- |"
    for (step, status, reason), count in sorted(found.items(), key=lambda item: (-item[1], item[0])):
        yield f"| {count} | {step} | {status} | {escaped(reason)} |"


def single(models: dict[str, Steps]) -> Iterator[str]:
    yield "| model | step | status | reason |"
    yield "| --- | --- | --- | --- |"
    for name in sorted(models):
        for step, result in models[name].items():
            if result["status"] in ("refuse", "fail"):
                yield f"| {name} | {step} | {result['status']} | {escaped(result['reason'])[:400]} |"


def escaped(text: str) -> str:
    """One line of a table. The rows of the sweep have no folders of a machine."""
    return " ".join(text.split()).replace("|", "\\|")


def versions() -> str:
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return ", ".join([f"Python {platform.python_version()}", *(f"{name} {v}" for name, v in found.items())])


def page(models: dict[str, Steps], ran: Sequence[str]) -> str:
    steps = dict.fromkeys(step.rpartition(".")[2] for step in step_names(models))
    return "\n".join(
        [
            "# Coverage",
            "",
            f"{len(models)} of the {len(ZOO)} models of `tests/zoo`, {datetime.now(UTC):%Y-%m-%d}, {versions()}.",
            "Written by `make coverage`; not edited by hand. What the expected counts mean: `tests/zoo/README.md`.",
            "",
            "What ran, and at which commit; a group that is not named for a model did not run on it:",
            "",
            *ran,
            "",
            "## Steps",
            "",
            "Each cell: pass / refuse (an error or a map entry of ours that says why) / fail / skip (nothing to do, or the plain model",
            "can't do it either). `passed` leaves the skipped ones out.",
            "",
            *table(models),
            "",
            *(f"- {step}: {MEANING[step]}." for step in steps),
            "",
            "## Reasons, counted",
            "",
            *classes(models),
            "",
            "## Every model that did not pass a step",
            "",
            *single(models),
            "",
        ]
    )


def main() -> None:
    target, *files = map(Path, sys.argv[1:])
    target.parent.mkdir(exist_ok=True)
    target.write_text(page(gather(files), list(runs(files))))


if __name__ == "__main__":
    main()
