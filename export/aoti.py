"""`to_aoti`, `load_aoti`: a model as an AOTInductor package that was loaded back and compared."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from resfx.export.blame import blame, first_line
from resfx.export.call import Call, make_call
from resfx.export.capture import capture
from resfx.export.compare import Difference, compare, tolerance_for
from resfx.export.entry import Entry, entry_of
from resfx.export.entry_check import EntryCheck
from resfx.export.errors import AotiError, OutputPathError
from resfx.export.feeds import Feed, feeds_for
from resfx.export.outputs import flatten_outputs
from resfx.export.paths import checked_path, staged
from resfx.export.quiet import quiet_failure
from resfx.export.run import check_module, evaluating, run_example

SUFFIX = ".pt2"
METADATA = "aot_inductor.metadata"  # Inductor's option for text that the runtime gets back
ENTRY = "resfx.entry"


@dataclass(frozen=True)
class AotiReport:
    """A package. `checks`: what was run ("batch 4"), with a difference for each output; empty with check=False."""

    path: Path
    bytes: int
    checks: Mapping[str, tuple[Difference, ...]]
    notes: tuple[str, ...]

    @property
    def max_difference(self) -> float | None:
        """The largest absolute difference to the model; None where nothing was checked."""
        return max((one.largest for found in self.checks.values() for one in found), default=None)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.bytes:,} bytes"]
        for label, found in self.checks.items():
            norm, largest = max(one.norm for one in found), max(one.largest for one in found)
            lines.append(f"  check   {label}: relative norm {norm:.1e}, largest {largest:.1e}")
        if not self.checks:
            lines.append("  check   none")
        return "\n".join([*lines, *(f"  note    {note}" for note in self.notes)])


def to_aoti(
    model: nn.Module,
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    check: bool = True,
    tolerance: float | None = None,
    inductor_configs: dict[str, Any] | None = None,
) -> AotiReport:
    """Compile `model`, called as `model(*args, **kwargs)` in eval mode, into the package `path` (ends in .pt2).

    The loaded package is called like the model in the example, checks its arguments, and returns what the model returns,
    numbers as 0-d tensors, on the device it was compiled for.
    `check`: load it, run it on the example and on another batch size where the batch is open, and compare. Sizes,
    tolerance and safety of the output file as in `to_onnx`.

    Raises NotAModuleError, InputError, OutputError, OutputPathError, TraceError, DynamicDimError, AotiError,
    OutputMismatchError: all subclasses of ResfxError.
    """
    target = checked_path(path, suffix=SUFFIX)
    model = check_module(model)
    call = make_call(model, args, kwargs)
    with evaluating(model), staged(target) as file:
        want = run_example(model, call)
        found = capture(model, call, dynamic_shapes, flat=False)
        _compile(model, found.program, file, _with_entry(call, found.program, inductor_configs))
        feeds, notes = feeds_for(model, call, found.sizes, want.tensors) if check else ({}, ())
        allowed = tolerance_for([*want.tensors, *model.parameters()], tolerance)
        differences = _check(call, file, want.names, feeds, allowed)
        size = file.stat().st_size
    return AotiReport(target, size, differences, (*found.notes, *notes))


def load_aoti(path: str | os.PathLike[str]) -> Callable[..., Any]:
    """The model in a package that `to_aoti` wrote: a function with the model's arguments and return value.

    A call raises InputError for an argument of another structure, dtype, device, rank, size, range or memory layout than the
    package was compiled for, and for another value of a constant: the compiled code would crash on it, or misread it.
    """
    if not Path(path).is_file():
        raise OutputPathError(f"there is no file {path}: write it with to_aoti first")
    try:
        loaded: Any = torch._inductor.aoti_load_package(str(path))
        entry = loaded.get_metadata().get(ENTRY)
    except Exception as error:  # the loader raises plain RuntimeErrors and errors of the zip format
        raise AotiError(f"{path} is no AOTInductor package for this machine: {first_line(error)}") from error
    if entry is None:
        raise AotiError(
            f"{path} does not say what it takes: it was not written by to_aoti; torch's own loader takes it"
        )
    fitting = EntryCheck(Entry.from_text(entry))

    def checked(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = fitting(args, kwargs)
        return loaded(*args, **kwargs)

    return checked


def _with_entry(call: Call, program: ExportedProgram, configs: dict[str, Any] | None) -> dict[str, Any]:
    """The user's options, and what the package takes as part of its metadata."""
    configs = dict(configs or {})
    metadata = {**configs.get(METADATA, {}), ENTRY: entry_of(call, program).to_text()}
    return {**configs, METADATA: metadata}


def _compile(model: nn.Module, program: ExportedProgram, file: Path, configs: dict[str, Any]) -> None:
    try:
        with quiet_failure():
            torch._inductor.aoti_compile_and_package(program, package_path=str(file), inductor_configs=configs)
    except Exception as error:  # code generation, the C++ compiler and the packager fail in their own ways
        raise AotiError(
            f"torch.export passed, AOTInductor stopped{blame(error, model)}: {first_line(error)}\n"
            "It needs a C++ compiler. For an operator it cannot compile use torch.compile: it can fall back to eager."
        ) from error


def _check(
    call: Call, file: Path, names: Sequence[str], feeds: Mapping[str, Feed], tolerance: float
) -> dict[str, tuple[Difference, ...]]:
    """Differences of the loaded package by label of the feed."""
    if not feeds:
        return {}
    loaded = load_aoti(file)
    result = {}
    for label, feed in feeds.items():
        where = f"the AOTInductor package ({label})"
        args, kwargs = call.rebuild([tensor.clone() for tensor in feed.inputs])
        try:
            returned = flatten_outputs(loaded(*args, **kwargs))
        except Exception as error:  # the compiled code raises plain RuntimeErrors
            raise AotiError(f"{where} cannot run the model: {first_line(error)}") from error
        found = dict(zip(returned.names, returned.tensors, strict=True))
        got = [found[name] for name in names if name in found]  # the package returns the model's numbers as tensors too
        result[label] = compare(names, got, feed.expected, tolerance, where)
    return result
