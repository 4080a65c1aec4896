"""The command line: `resfx find | rewrite | export | demo`.

Exit codes: 0 done; 1 a ResfxError (the result is not as asked: no residual found, a check failed); 2 a usage error.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

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
from resfx.cli_report import Answer, diff, facts, graph_text, map_parts, rewritten_table, show, show_error, step
from resfx.demo import run_demo
from resfx.export.capture import trace
from resfx.export.errors import OutputPathError
from resfx.export.paths import checked_path, staged
from resfx.libraries import example_inputs
from resfx.passes.errors import FormError
from resfx.patterns.errors import NoResidualFound, ResfxError
from resfx.patterns.report import ResidualMap

app = typer.Typer(
    help="Find the residual connections of a PyTorch model and rewrite them into a better residual form.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Frontend(StrEnum):
    """How the model's graph is captured."""

    export = "export"
    fx = "fx"


class Target(StrEnum):
    """Where a rewritten model can go."""

    onnx = "onnx"
    aoti = "aoti"


class Dtype(StrEnum):
    """What the model's floating-point weights and inputs are cast to."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"
    float16 = "float16"


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:callable, file.py:callable, torchvision:NAME, timm:NAME, a transformers folder, or a .pt2",
    ),
]
Form = Annotated[str, typer.Option("--form", help='The residual form, as "delta", "review" or "scaled_loop(lam=0.5)".')]
Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input", help="name=float32[2,3,224,224], name=int64[2,16]:1000, name=file.pt, name=False; repeatable."
    ),
]
Select = Annotated[list[str] | None, typer.Option(help="Rewrite only sites whose module path matches; repeatable.")]
Streams = Annotated[list[int] | None, typer.Option("--stream", help="Rewrite only this stream; repeatable.")]
WarmStart = Annotated[bool, typer.Option("--warm-start", help="Start as exactly the plain model's function.")]
Seed = Annotated[int, typer.Option(help="Seed of random weights and inputs.")]
Front = Annotated[Frontend, typer.Option(help="How to capture the graph.")]
Cast = Annotated[Dtype | None, typer.Option(help="Cast floating-point weights and inputs.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else there.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def answers(command: Callable[..., Answer]) -> Callable[..., None]:
    """Turns a function that returns an Answer into a command: prints it, and errors as a panel with their exit code."""

    @functools.wraps(command)
    def run(*args: Any, as_json: bool, debug: bool, **options: Any) -> None:
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for the answer, not for what a model's code prints
                answer = command(*args, as_json=as_json, debug=debug, **options)
        except (typer.Exit, typer.Abort, KeyboardInterrupt):
            raise
        except Exception as error:
            if debug:
                raise
            show_error(error, as_json, _hint(error))
            raise typer.Exit(_exit_code(error)) from error
        show(answer, as_json)

    return run


@app.command()
@answers
def find(
    model: Model,
    inputs: Inputs = None,
    unweighted: Annotated[bool, typer.Option("--unweighted", help="Branches without a Parameter count too.")] = False,
    explain: Annotated[str | None, typer.Option(help="Say why the adds of this module path are sites or not.")] = None,
    frontend: Front = Frontend.export,
    dtype: Cast = None,
    seed: Seed = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Show the residual streams and sites of a model, and what was refused and why."""
    module, args, kwargs = _prepare(model, inputs, dtype, seed)
    with step("find"):
        found = resfx.find(module, args, kwargs, frontend=frontend.value, unweighted=unweighted)
    if not found.sites:
        raise NoResidualFound(f"No residual connection was found in {model}.{_near(found)}", found.rejected)
    if explain is None:
        return Answer(found.to_dict(), map_parts(found))
    reasons = str(found.explain(explain))
    return Answer({"explain": explain, "reasons": reasons}, [Text(reasons)])


@app.command()
@answers
def rewrite(
    model: Model,
    form: Form,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Save the result, in eval mode, as a torch.export program."),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Print the rewritten graph.")] = False,
    inputs: Inputs = None,
    select: Select = None,
    stream: Streams = None,
    warm_start: WarmStart = False,
    frontend: Front = Frontend.export,
    dtype: Cast = None,
    seed: Seed = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Rewrite a model's residuals. Without -o nothing is written: the change of the graph is shown."""
    passes.from_spec(form)  # a mistake in it is better told before the model is loaded
    target = None if output is None else checked_path(output, suffix=".pt2")
    module, args, kwargs = _prepare(model, inputs, dtype, seed)
    options = _options(select, stream, warm_start, frontend)
    result = _rewritten(module, form, args, kwargs, options)
    text = []
    if output is None and not as_json:
        text.append(_change(module, result, args, kwargs, options))
    if graph:
        text.append(Text(graph_text(result)))
    if target is not None:
        with step("save"):
            _save(result, target, args, kwargs)
    data = _summary(result, form, output)
    return Answer(data, [*text, rewritten_table(data)])


@app.command()
@answers
def export(
    model: Model,
    form: Form,
    to: Annotated[Target, typer.Option("--to", help="ONNX, or a package of AOTInductor.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="model.onnx or model.pt2.")],
    inputs: Inputs = None,
    select: Select = None,
    stream: Streams = None,
    warm_start: WarmStart = False,
    frontend: Front = Frontend.export,
    dtype: Cast = None,
    seed: Seed = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> Answer:
    """Rewrite a model, export it, run the exported file and compare its numbers with PyTorch's."""
    passes.from_spec(form)
    target = checked_path(output, suffix=".onnx" if to is Target.onnx else ".pt2")
    module, args, kwargs = _prepare(model, inputs, dtype, seed)
    result = _rewritten(module, form, args, kwargs, _options(select, stream, warm_start, frontend))
    with step(f"export to {to.value} and check"):
        lower = resfx.export.to_onnx if to is Target.onnx else resfx.export.to_aoti
        report = lower(result, target, args, kwargs)
    data = _summary(result, form, output)
    return Answer({**data, "report": report}, [rewritten_table(data), Text(str(report))])


@app.command()
@answers
def demo(seed: Seed = 0, as_json: Json = False, debug: Debug = False) -> Answer:
    """The whole way on a small built-in GPT: find, rewrite, verify, compile, export, run in ONNX Runtime."""
    torch.manual_seed(seed)
    result = run_demo(passes.from_spec("delta"), step)
    compiled = "" if result.difference_compiled is None else f", differs from eager by {result.difference_compiled:.1e}"
    rows = {
        "residual sites": f"{result.rewritten} of {result.sites} rewritten to delta",
        "parameters": f"{result.parameters_before:,} + {result.parameters_added:,} new",
        "max difference at the start": f"{result.difference_at_init:.1e}",
        "weakest new parameter moves the output by": f"{result.smallest_effect:.1e}",
        "compile": result.compiled + compiled,
        "milliseconds, plain -> rewritten": f"{result.milliseconds_before:.2f} -> {result.milliseconds_after:.2f}",
        "ONNX": f"{result.onnx_bytes / 1e6:.1f} MB, in ONNX Runtime off by at most {result.onnx_difference:.1e}",
        "ONNX runs": "; ".join(result.onnx_runs),
    }
    data = {**vars(result), "found": result.found.to_dict()}
    return Answer(data, [*map_parts(result.found), facts("demo", rows)])


def _prepare(spec: str, inputs: list[str] | None, dtype: Dtype | None, seed: int) -> tuple[nn.Module, Args, Kwargs]:
    torch.manual_seed(seed)
    with step("load"):
        module, known = load_model(spec)
        if known is None:
            known = example_inputs(module)
    args, kwargs = complete_inputs(module, known, inputs or [])
    if dtype is None:
        return module, args, kwargs
    target = getattr(torch, dtype.value)

    def cast(value: Any) -> Any:
        return value.to(target) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(cast, (args, kwargs))
    return module.to(target), args, kwargs


def _options(
    select: list[str] | None, stream: list[int] | None, warm_start: bool, frontend: Frontend
) -> dict[str, Any]:
    return {"select": select, "streams": stream, "warm_start": warm_start, "frontend": frontend.value}


def _rewritten(module: nn.Module, form: str, args: Args, kwargs: Kwargs, options: dict[str, Any]) -> resfx.Rewritten:
    with step("rewrite"):
        # The process ends with the command, so the model's own modules need no copy.
        return resfx.rewrite(module, passes.from_spec(form), args, kwargs, copy=False, **options)


def _change(module: nn.Module, result: resfx.Rewritten, args: Args, kwargs: Kwargs, options: dict[str, Any]) -> Text:
    """The graph's change, as a diff from the same capture with its residuals left plain."""
    plain = _rewritten(module, "standard", args, kwargs, {**options, "warm_start": False})
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
        "sites": {stream.index: len(stream.sites) for stream in found.streams if stream.index in found.forms},
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


def _exit_code(error: Exception) -> int:
    return 2 if isinstance(error, UsageError | FormError | OutputPathError) else 1


def _hint(error: Exception) -> str:
    if isinstance(error, ResfxError):
        return ""
    return "resfx did not expect this error. --debug shows the traceback."


def main() -> None:
    """Entry point of the `resfx` script."""
    app()
