"""What `to_onnx` made and how well it agrees with the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resfx.export.compare import Difference


@dataclass(frozen=True)
class Port:
    """One input or output of the graph; an open size is its name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def dynamic(self) -> tuple[int, ...]:
        """The dims whose size is open."""
        return tuple(i for i, size in enumerate(self.shape) if isinstance(size, str))

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Check:
    """One run in ONNX Runtime: `optimisations` "off" or "on", `batch` as in "batch 4", a difference for each output."""

    optimisations: str
    batch: str
    differences: tuple[Difference, ...]

    @property
    def norm(self) -> float:
        """The largest relative norm over the outputs."""
        return max(difference.norm for difference in self.differences)

    @property
    def largest(self) -> float:
        """The largest absolute difference over the outputs."""
        return max(difference.largest for difference in self.differences)


@dataclass(frozen=True)
class OnnxReport:
    """An exported file. `bytes` counts the file of external data too; `checks` is empty with check=False."""

    path: Path
    opset: int
    bytes: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...]

    @property
    def max_difference(self) -> float | None:
        """The largest absolute difference of all checks; None where nothing was checked."""
        return max((check.largest for check in self.checks), default=None)

    def __str__(self) -> str:
        lines = [f"{self.path}: opset {self.opset}, {self.bytes:,} bytes"]
        lines += [f"  input   {port}" for port in self.inputs]
        lines += [f"  output  {port}" for port in self.outputs]
        lines += [
            f"  check   {check.batch}, optimisations {check.optimisations}: relative norm {check.norm:.1e}, "
            f"largest {check.largest:.1e}"
            for check in self.checks
        ]
        if not self.checks:
            lines.append("  check   none")
        return "\n".join([*lines, *(f"  note    {note}" for note in self.notes)])


def describe(
    program: Any,
    target: Path,
    file: Path,
    opset: int,
    differences: Mapping[tuple[str, str], tuple[Difference, ...]],
    notes: Sequence[str],
) -> OnnxReport:
    """The report on `program` (a torch.onnx.ONNXProgram) that stands in `file` and will stand at `target`."""
    graph = program.model.graph
    return OnnxReport(
        path=target,
        opset=opset,
        bytes=sum(entry.stat().st_size for entry in file.parent.iterdir()),
        inputs=tuple(_port(value) for value in graph.inputs),
        outputs=tuple(_port(value) for value in graph.outputs),
        checks=tuple(Check(setting, label, found) for (setting, label), found in differences.items()),
        notes=tuple(notes),
    )


def _port(value: Any) -> Port:
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape or ())
    return Port(value.name, value.dtype.name.lower(), shape)
