"""The command line: `resfx find | rewrite | export | demo`.

Exit codes: 0 done; 1 a ResfxError (the result is not as asked: no residual found, a check failed); 2 a usage error.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from resfx.cli_options import Change, Output, Seed, Source, Target, grouped, one_of

app = typer.Typer(
    help="Find the residual connections of a PyTorch model and rewrite them into a better residual form.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"resfx {version('resfx')}, torch {version('torch')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Find the residual connections of a PyTorch model and rewrite them into a better residual form."""


# The commands' own module imports torch, which takes seconds: only a command that runs waits for it.


@app.command()
@grouped
def find(
    *,
    source: Source,
    unweighted: Annotated[bool, typer.Option("--unweighted", help="Branches without a Parameter count too.")] = False,
    explain: Annotated[
        str | None, typer.Option(metavar="PATH", help="Say why the adds of this module path are sites or not.")
    ] = None,
    output: Output,
) -> None:
    """Show a model's residual streams and sites.

    --explain tells why the adds of one module are sites, or are not.
    """
    from resfx import cli_commands

    cli_commands.answer(output, lambda: cli_commands.find(source, unweighted, explain))


@app.command()
@grouped
def rewrite(
    *,
    change: Change,
    file: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Save the result, in eval mode, as a torch.export program."
        ),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Print the rewritten graph.")] = False,
    source: Source,
    output: Output,
) -> None:
    """Rewrite a model's residuals.

    Without -o nothing is written: the change of the graph is shown.
    """
    from resfx import cli_commands

    cli_commands.answer(output, lambda: cli_commands.rewrite(source, change, file, graph, with_diff=not output.as_json))


@app.command()
@grouped
def export(
    *,
    change: Change,
    to: Annotated[Target, one_of(Target, "--to", help="ONNX, or a package of AOTInductor.")],
    file: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="model.onnx or model.pt2.")],
    inline: Annotated[
        bool, typer.Option("--inline", help="ONNX: the form's steps as plain nodes, not as functions named after it.")
    ] = False,
    source: Source,
    output: Output,
) -> None:
    """Rewrite a model and export the result.

    The exported file is run, and its numbers are compared with PyTorch's.
    """
    from resfx import cli_commands

    cli_commands.answer(output, lambda: cli_commands.export(source, change, to, file, inline))


@app.command()
@grouped
def demo(*, seed: Seed = 0, output: Output) -> None:
    """Show the whole way on a small built-in GPT.

    Find, rewrite, verify, compile, export, run in ONNX Runtime.
    """
    from resfx import cli_commands

    cli_commands.answer(output, lambda: cli_commands.demo(seed))


def main() -> None:
    """Entry point of the `resfx` script."""
    app()
