"""The options of the command line, each stated once. Nothing here imports torch: `--help` must not wait for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Annotated, Any, get_type_hints

import typer


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


def one_of(choices: type[StrEnum], *names: str, help: str) -> Any:
    """An option that takes one of the values of an enumeration."""

    def parse(text: str) -> StrEnum:
        if text not in list(choices):
            listed = ", ".join(repr(choice.value) for choice in choices)
            raise typer.BadParameter(f"{text!r} is not one of {listed}.")
        return choices(text)

    return typer.Option(*names, parser=parse, metavar="|".join(choices), help=help)


Seed = Annotated[int, typer.Option(metavar="N", help="Seed of random weights and inputs.")]


@dataclass(frozen=True, kw_only=True)
class Source:
    """Which model, and how it is called and captured."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="package.module:callable, file.py:callable, torchvision:NAME, timm:NAME, a transformers folder, or a .pt2",
        ),
    ]
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME=VALUE",
            help="name=float32[2,3,224,224], name=int64[2,16]:1000, name=file.pt, name=file.npy, name=False; repeatable.",
        ),
    ] = None
    frontend: Annotated[Frontend, one_of(Frontend, help="How to capture the graph.")] = Frontend.export
    dtype: Annotated[Dtype | None, one_of(Dtype, help="Cast floating-point weights and inputs.")] = None
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Change:
    """What becomes of its residuals."""

    form: Annotated[
        str,
        typer.Option(
            "--form", metavar="FORM", help='The residual form, as "delta", "review" or "scaled_loop(lam=0.5)".'
        ),
    ]
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Rewrite only sites whose module path matches; repeatable."),
    ] = None
    stream: Annotated[
        list[int] | None, typer.Option("--stream", metavar="N", help="Rewrite only this stream; repeatable.")
    ] = None
    warm_start: Annotated[bool, typer.Option("--warm-start", help="Start as exactly the plain model's function.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class Output:
    """How the answer is shown."""

    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else there.")] = False
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for typer, which reads single options, from a function that takes dataclasses of options."""
    hints = get_type_hints(command, include_extras=True)
    parameters = inspect.signature(command).parameters.values()
    groups = {parameter.name: hints[parameter.name] for parameter in parameters if is_dataclass(hints[parameter.name])}

    def run(**given: Any) -> None:
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        command(**made, **given)

    single: list[inspect.Parameter] = []
    for parameter in parameters:
        if parameter.name in groups:
            single.extend(_options(groups[parameter.name]))
            continue
        single.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(single)  # type: ignore[attr-defined]
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
