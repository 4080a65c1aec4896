"""What `--input` says: example inputs for a model, by name.

x=float32[2,3,224,224]      random values of that dtype and shape (floats: normal; bool: all True)
ids=int64[2,16]             integers below the model's smallest nn.Embedding table, below 2 where it has none
ids=int64[2,16]:1000        integers in [0, 1000)
mask=int64[2,16]:1:2        integers in [1, 2), so all ones
x=batch.pt, x=batch.npy     a saved tensor or array
use_cache=False             any Python literal
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from resfx.patterns.errors import ResfxError

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_TENSOR = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d,\s]*)\](?::(?P<first>-?\d+))?(?::(?P<second>-?\d+))?")
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}
_EXAMPLE = "name=float32[2,3,224,224], name=int64[2,16]:1000, name=file.pt, name=file.npy or name=False"


class UsageError(ResfxError):
    """The command line asks for something that can't be: exit code 2."""


def complete_inputs(model: nn.Module, known: tuple[Args, Kwargs] | None, specs: Sequence[str]) -> tuple[Args, Kwargs]:
    """Example (args, kwargs) for `model`: `known` with every `--input` of `specs` laid over it by name.

    Raises UsageError where a spec can't be read, names no argument of `forward`, or a required argument has no value.
    """
    given = dict(parse_input(spec, model) for spec in specs)
    signature = inspect.signature(model.forward)
    _refuse_unknown(model, signature, given)
    values = {**_named(model, signature, known), **given}
    missing = [name for name in _required(signature) if name not in values]
    if missing:
        shown = " ".join(f"--input {name}=float32[2,16]" for name in missing)
        raise UsageError(
            f"{type(model).__name__}.forward needs {', '.join(missing)}, and nothing says what to pass.\n"
            f"Try: {shown} with the shape that fits; token ids are int64[2,16]:VOCABULARY"
        )
    if known is not None and not given:
        return known
    return _split(signature, values)


def parse_input(spec: str, model: nn.Module) -> tuple[str, Any]:
    """`name=value` -> (name, the tensor or constant)."""
    name, equals, text = spec.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"--input {spec!r} is not of the form {_EXAMPLE}.")
    match = _TENSOR.fullmatch(text)
    if match:
        return name, _random(name, match, model)
    if Path(text).suffix in (".pt", ".npy"):
        return name, _saved(name, Path(text))
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise UsageError(f"--input {name}: can't read {text!r}.\nTry {_EXAMPLE}.") from error


def _random(name: str, match: re.Match[str], model: nn.Module) -> torch.Tensor:
    dtype = _DTYPES.get(match["dtype"])
    if dtype is None:
        raise UsageError(f"--input {name}: unknown dtype {match['dtype']!r}. Known: {', '.join(_DTYPES)}.")
    try:
        shape = [int(size) for size in match["shape"].split(",") if size.strip()]
    except ValueError as error:
        raise UsageError(f"--input {name}: can't read the shape [{match['shape']}]. Try [2,3,224,224].") from error
    if dtype.is_floating_point:
        if match["first"]:
            raise UsageError(f"--input {name}: a range is for integers, not for {match['dtype']}.")
        return torch.randn(shape).to(dtype)
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    low, high = _range(match, model)
    if low >= high or high - 1 > torch.iinfo(dtype).max or low < torch.iinfo(dtype).min:
        raise UsageError(f"--input {name}: no {match['dtype']} lies in [{low}, {high}).")
    return torch.randint(low, high, shape, dtype=dtype)


def _range(match: re.Match[str], model: nn.Module) -> tuple[int, int]:
    if match["second"]:
        return int(match["first"]), int(match["second"])
    if match["first"]:
        return 0, int(match["first"])
    # An index that every table of the model holds is right whichever table this input looks up.
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return 0, min(tables, default=2)


def _saved(name: str, path: Path) -> torch.Tensor:
    if not path.is_file():
        raise UsageError(f"--input {name}: there is no file {path}.")
    try:
        if path.suffix == ".npy":
            return torch.from_numpy(np.load(path, allow_pickle=False))
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UsageError(f"--input {name}: {path} can't be read: {error}") from error
    if not isinstance(value, torch.Tensor):
        raise UsageError(f"--input {name}: {path} holds a {type(value).__name__}, not a tensor.")
    return value


def _refuse_unknown(model: nn.Module, signature: inspect.Signature, given: Mapping[str, Any]) -> None:
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return
    for name in given:
        if name not in signature.parameters:
            raise UsageError(
                f"--input {name}: {type(model).__name__}.forward has no argument {name!r}. "
                f"It has: {', '.join(signature.parameters) or 'none'}."
            )


def _named(model: nn.Module, signature: inspect.Signature, known: tuple[Args, Kwargs] | None) -> Kwargs:
    """Known example inputs by argument name."""
    if known is None:
        return {}
    args, kwargs = known
    try:
        bound = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
        raise UsageError(f"The example arguments do not fit {type(model).__name__}.forward: {error}.") from error
    named: Kwargs = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    return named


def _required(signature: inspect.Signature) -> list[str]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        name
        for name, parameter in signature.parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
    ]


def _split(signature: inspect.Signature, values: Kwargs) -> tuple[Args, Kwargs]:
    """Leading arguments go by position, as one writes `model(x)`; from the first gap on, by keyword."""
    rest = dict(values)
    args: list[Any] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            args.extend(rest.pop(name, ()))
            break
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY or name not in rest:
            break
        args.append(rest.pop(name))
    return tuple(args), rest
