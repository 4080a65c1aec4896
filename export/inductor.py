"""`compile`: torch.compile with errors that name the place in the model."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from resfx.export.blame import blame, chain, first_line, first_lines
from resfx.export.errors import CompileError
from resfx.export.run import check_module

_Result = TypeVar("_Result")


def compile(
    model: nn.Module,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = True,
    options: dict[str, Any] | None = None,
) -> nn.Module:
    """torch.compile(model, ...) as is; the module it returns compiles on its first call, forward and backward.

    Raises CompileError here for an unknown backend or a mode together with options, and at the call for a graph break
    (with `fullgraph`), an unsupported operation or an error inside the backend. Errors of the compiled code as it runs
    pass through.
    """
    check_module(model)
    if mode is not None and options is not None:
        raise CompileError("torch.compile takes a mode or options, not both: leave one out")
    try:
        compiled = torch.compile(
            model, backend=backend, mode=mode, dynamic=dynamic, fullgraph=fullgraph, options=options
        )
    except Exception as error:  # unknown names reach us as several types
        raise CompileError(f"torch.compile refuses these options: {first_line(error)}") from error
    assert isinstance(compiled, nn.Module)
    compiled.forward = _explained(compiled.forward, model)
    return compiled


def _explained(forward: Callable[..., _Result], model: nn.Module) -> Callable[..., _Result]:
    @functools.wraps(forward)
    def explained(*args: Any, **kwargs: Any) -> _Result:
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            if not _is_compiler_error(error):
                raise
            raise CompileError(
                f"torch.compile stopped{blame(error, model)}: {first_lines(error, 3)}\n"
                "fullgraph=False compiles what lies around a graph break; torch.cond and torch.where express "
                "data-dependent control flow."
            ) from error

    return explained


def _is_compiler_error(error: Exception) -> bool:
    """Whether Dynamo, AOTAutograd or the backend raised it, told by the package its class or its cause's comes from."""
    packages = ("torch._dynamo", "torch._inductor", "torch._functorch")
    return any(type(link).__module__.startswith(packages) for link in chain(error))
