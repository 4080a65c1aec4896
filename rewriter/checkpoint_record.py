"""What a checkpoint says in words: the forms, where they are, and what the model looked like. Plain JSON, no pickle."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from resfx import passes
from resfx.checkpoint_files import CheckpointError, read_json, write_json
from resfx.passes import Plan
from resfx.patterns import Site, Stream

FILE = "resfx.json"
FORMAT = 1


@dataclass(frozen=True)
class RecordedPlan:
    """One rewritten stream: the form's spec and the indices of the sites that took it."""

    stream: int
    form: str
    warm_start: bool
    sites: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> RecordedPlan:
        sites = tuple(s.index for s in plan.stream.sites if plan.select is None or plan.select(s))
        return cls(plan.stream.index, plan.form.to_spec(), plan.warm_start, sites)

    def plan(self, streams: Sequence[Stream]) -> Plan:
        """The plan on `streams`. Errors: FormError for a form that this version does not know."""
        chosen = frozenset(self.sites)
        return Plan(
            streams[self.stream], passes.from_spec(self.form), lambda site: site.index in chosen, self.warm_start
        )


@dataclass(frozen=True)
class Fingerprint:
    """One site, by what a form depends on. `size`: D; None where the stream has no known feature axis or D is open."""

    path: str
    kind: str
    size: int | None
    branches: int
    branch_id: int

    @classmethod
    def of(cls, stream: Stream, site: Site) -> Fingerprint:
        size = stream.shape[stream.axis] if stream.axis is not None and stream.shape else None
        fixed = size if isinstance(size, int) else None
        return cls(site.path, site.kind, fixed, len(site.branches), site.branch_id)

    def __str__(self) -> str:
        return (
            f"module {self.path or '(root)'}, {self.kind}, D={self.size}, "
            f"{self.branches} branches, branch number {self.branch_id}"
        )


def fingerprints(streams: Sequence[Stream]) -> tuple[tuple[Fingerprint, ...], ...]:
    """One tuple per stream, one entry per site."""
    return tuple(tuple(Fingerprint.of(stream, site) for site in stream.sites) for stream in streams)


@dataclass(frozen=True)
class Record:
    """`plans` by stream; `fingerprints` of all streams; `shared`: second name of a tensor -> the name it is stored under."""

    plans: tuple[RecordedPlan, ...]
    fingerprints: tuple[tuple[Fingerprint, ...], ...]
    shared: dict[str, str]
    versions: dict[str, str]

    def write(self, folder: Path) -> None:
        write_json(
            folder / FILE,
            {
                "format": FORMAT,
                "versions": self.versions,
                "rewritten": [asdict(plan) for plan in self.plans],
                "streams": [[asdict(site) for site in stream] for stream in self.fingerprints],
                "shared": self.shared,
            },
        )

    @classmethod
    def read(cls, folder: Path) -> Record:
        """Errors: CheckpointPathError, CheckpointError for a damaged file or one of a later format."""
        file = folder / FILE
        content = read_json(file)
        if not isinstance(content, dict) or not isinstance(content.get("format"), int):
            raise CheckpointError(f"{file} is no checkpoint of resfx: name a folder that resfx.save has written")
        if content["format"] > FORMAT:
            raise CheckpointError(
                f"{file} has format {content['format']}, this version reads up to {FORMAT}: "
                f"update resfx (it was saved by {content.get('versions', {}).get('resfx', 'a later one')})"
            )
        try:
            return _parsed(content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{file} is damaged ({error!r}): save the checkpoint again") from error

    def check(self, streams: Sequence[Stream]) -> None:
        """Errors: CheckpointError naming the first site where the model is not the one that was saved."""
        difference = _first_difference(self.fingerprints, streams)
        if difference is None:
            return
        now = versions()
        changed = ", ".join(
            f"{name} {old} then, {now.get(name, 'none')} now"
            for name, old in self.versions.items()
            if now.get(name) != old
        )
        other = f"; saved by other versions: {changed}" if changed else ""
        raise CheckpointError(
            f"the checkpoint belongs to another architecture: {difference}. "
            f"Pass the model it was saved from (the same configuration){other}"
        )


def versions() -> dict[str, str]:
    """What a checkpoint may depend on."""
    found = {"resfx": _version("resfx"), "torch": str(torch.__version__), "python": platform.python_version()}
    found["safetensors"] = _version("safetensors")
    return found | {name: _version(name) for name in ("transformers", "timm", "torchvision") if name in sys.modules}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _parsed(content: Mapping[str, Any]) -> Record:
    plans = tuple(
        RecordedPlan(int(p["stream"]), str(p["form"]), bool(p["warm_start"]), tuple(map(int, p["sites"])))
        for p in content["rewritten"]
    )
    known = tuple(tuple(Fingerprint(**site) for site in stream) for stream in content["streams"])
    if any(plan.stream not in range(len(known)) for plan in plans):
        raise ValueError("a rewritten stream is not listed")
    return Record(plans, known, dict(content["shared"]), dict(content["versions"]))


def _first_difference(saved: Sequence[Sequence[Fingerprint]], streams: Sequence[Stream]) -> str | None:
    for number in range(max(len(saved), len(streams))):
        if number >= len(saved):
            site = streams[number].sites[0]
            return f"the model has one more stream, {number}, from {_place(site)} on"
        before, stream = saved[number], streams[number] if number < len(streams) else None
        sites = stream.sites if stream is not None else []
        for index in range(max(len(before), len(sites))):
            where = f"site {index} of stream {number}"
            if stream is None or index >= len(sites):
                return f"{where} ({before[index]}) is not in the model"
            if index >= len(before):
                return f"{where} ({_place(sites[index])}) is not in the checkpoint"
            now = Fingerprint.of(stream, sites[index])
            if now != before[index]:
                return f"{where} was saved as {before[index]}; the model has {now}, {sites[index].source or sites[index].node.name}"
    return None


def _place(site: Site) -> str:
    return f"module {site.path or '(root)'}, {site.source or site.node.name}"
