"""What the commands do: each gives an `Answer`; `answer` prints it, or the error with its exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from rich.text import Text
from torch import nn
from torch.utils import _pytree as pytree

import resfx
import resfx.export
from resfx import passes
from resfx.cli_inputs import Args, Kwargs, UsageError, complete_inputs
from resfx.cli_models import load_model
from resfx.cli_options import Change, Output, Source, Target
from resfx.cli_report import Answer, diff, facts, graph_text, map_parts, rewritten_table, show, show_error, step
from resfx.demo import run_demo
from resfx.export import AotiReport, OnnxReport
from resfx.export.capture import trace
from resfx.export.errors import OutputPathError
from resfx.export.paths import checked_path, staged
from resfx.libraries import example_inputs
from resfx.passes.errors import FormError
from resfx.patterns.errors import NoResidualFound, ResfxError, UnknownPlace
from resfx.patterns.report import ResidualMap
from resfx.selection import SelectionError

# What the command line itself got wrong: it can't be read, or names what is not there.
_USAGE = (UsageError, FormError, OutputPathError, UnknownPlace, SelectionError)


def answer(output: Output, command: Callable[[], Answer]) -> None:
    """Run a command and print its answer on stdout; an error is a panel on stderr, and the exit code."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the answer, not for what a model's code prints
            result = command()
    except Exception as error:
        if output.debug:
            raise
        show_error(error, output.as_json, _hint(error))
        raise typer.Exit(2 if isinstance(error, _USAGE) else 1) from error
    show(result, output.as_json)


def find(source: Source, unweighted: bool, explain: str | None) -> Answer:
    """The map of a model, or why the adds of one module are sites or not."""
    module, args, kwargs = _prepare(source)
    with step("find"):
        found = resfx.find(module, args, kwargs, frontend=source.frontend.value, unweighted=unweighted)
    if explain is not None:
        reasons = found.explain(explain)
        return Answer({"explain": explain, "reasons": reasons}, [Text(reasons)])
    if not found.sites:
        raise NoResidualFound(f"No residual connection was found in {source.model}.{_near(found)}", found.rejected)
    return Answer(found.to_dict(), map_parts(found))


def rewrite(source: Source, change: Change, file: Path | None, graph: bool, *, with_diff: bool) -> Answer:
    """The rewritten model as a file, or how its graph changes."""
    passes.from_spec(change.form)  # a mistake in it is better told before the model is loaded
    target = None if file is None else checked_path(file, suffix=".pt2")
    module, args, kwargs = _prepare(source)
    result = _rewritten(module, args, kwargs, source, change)
    text = []
    if file is None and with_diff:
        text.append(_change(module, result, args, kwargs, source, change))
    if graph:
        text.append(Text(graph_text(result)))
    if target is not None:
        with step("save"):
            _save(result, target, args, kwargs)
    data = _summary(result, change.form, file)
    return Answer(data, [*text, rewritten_table(data)])


def export(source: Source, change: Change, to: Target, file: Path, inline: bool) -> Answer:
    """The rewritten model as an exported file that was run and compared."""
    if inline and to is not Target.onnx:
        raise UsageError("--inline belongs to --to onnx")
    passes.from_spec(change.form)
    target = checked_path(file, suffix=".onnx" if to is Target.onnx else ".pt2")
    module, args, kwargs = _prepare(source)
    result = _rewritten(module, args, kwargs, source, change)
    with step(f"export to {to.value} and check"):
        report: OnnxReport | AotiReport
        if to is Target.onnx:
            report = resfx.export.to_onnx(result, target, args, kwargs, inline=inline)
        else:
            report = resfx.export.to_aoti(result, target, args, kwargs)
    data = _summary(result, change.form, file)
    return Answer({**data, "report": report}, [rewritten_table(data), Text(str(report))])


def demo(seed: int) -> Answer:
    """Every step of the demo and its numbers."""
    torch.manual_seed(seed)
    result = run_demo(passes.from_spec("delta"), step)
    data = {**vars(result), "found": result.found.to_dict()}
    return Answer(data, [*map_parts(result.found), facts("demo", result.rows())])


def _prepare(source: Source) -> tuple[nn.Module, Args, Kwargs]:
    torch.manual_seed(source.seed)
    with step("load"):
        module, known = load_model(source.model)
        if known is None:
            known = example_inputs(module)
    args, kwargs = complete_inputs(module, known, source.inputs or [])
    if source.dtype is None:
        return module, args, kwargs
    target = getattr(torch, source.dtype.value)

    def cast(value: Any) -> Any:
        return value.to(target) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(cast, (args, kwargs))
    return module.to(target), args, kwargs


def _rewritten(module: nn.Module, args: Args, kwargs: Kwargs, source: Source, change: Change) -> resfx.Rewritten:
    with step("rewrite"):
        return resfx.rewrite(
            module,
            passes.from_spec(change.form),
            args,
            kwargs,
            copy=False,  # the process ends with the command, so the model's own modules need no copy
            select=change.select,
            streams=change.stream,
            warm_start=change.warm_start,
            frontend=source.frontend.value,
        )


def _change(
    module: nn.Module, result: resfx.Rewritten, args: Args, kwargs: Kwargs, source: Source, change: Change
) -> Text:
    """The graph's change, as a diff from the same capture with its residuals left plain."""
    plain = _rewritten(module, args, kwargs, source, replace(change, form="standard", warm_start=False))
    return diff(graph_text(plain), graph_text(result))


def _save(result: resfx.Rewritten, path: Path, args: Args, kwargs: Kwargs) -> None:
    """Export with every size left open that the model leaves open; the file appears whole or not at all."""
    shapes = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            shapes[leaf] = dict.fromkeys(range(leaf.dim()), torch.export.Dim.AUTO)
    program = trace(result.eval(), result, args, kwargs, shapes, asked=False)
    with staged(path) as draft:
        torch.export.save(program, draft)


def _summary(result: resfx.Rewritten, form: str, output: Path | None) -> dict[str, Any]:
    new = {name: list(p.shape) for name, p in result.named_parameters() if name.startswith("residual.")}
    found = result.residual_map
    return {
        "form": passes.from_spec(form).to_spec(),
        "sites": {stream: len(sites) for stream, sites in found.chosen.items()},
        "refused": found.refused,
        "notes": found.notes,
        "parameters_added": sum(torch.Size(shape).numel() for shape in new.values()),
        "parameters": new,
        "output": None if output is None else str(output),
    }


def _near(found: ResidualMap) -> str:
    """The first sums that came near, with the reason for each."""
    lines = [f"{near.source or near.node.name}: no site ({near.stage}): {near.reason}" for near in found.rejected[:5]]
    return "".join(f"\n{line}" for line in lines)


def _hint(error: Exception) -> str:
    if isinstance(error, ResfxError):
        return ""
    return "resfx did not expect this error. --debug shows the traceback."
