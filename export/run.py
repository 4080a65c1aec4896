"""Run and wrap a model for export without changing it: flags, buffers and arguments are left as they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from resfx.export.blame import blame, first_line
from resfx.export.call import Call
from resfx.export.errors import InputError, NotAModuleError, OutputError
from resfx.export.outputs import Outputs, flatten_outputs

PREFIX = "model."  # what FlatModule adds to the names of the model's parameters


class FlatModule(nn.Module):
    """`model` as a function of tensors only: flat tensors in, a flat tuple of distinct new tensors out.

    ONNX knows neither containers nor aliases: an output that is an input, a parameter or an earlier output is cloned.
    """

    def __init__(self, model: nn.Module, call: Call) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.training = model.training

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = self.call.rebuild(tensors)
        seen = {id(tensor) for tensor in (*tensors, *self.model.parameters(), *self.model.buffers())}
        result = []
        for tensor in flatten_outputs(self.model(*args, **kwargs)).tensors:
            result.append(tensor.clone() if id(tensor) in seen else tensor)
            seen.add(id(tensor))
        return tuple(result)


def check_module(model: object) -> nn.Module:
    """`model` itself, or NotAModuleError."""
    if isinstance(model, torch.jit.ScriptModule):
        raise NotAModuleError("the model is a TorchScript module: pass the nn.Module it was made from")
    if isinstance(model, nn.Module):
        return model
    hint = (
        "call it and pass the instance" if isinstance(model, type) else "wrap it in an nn.Module whose forward calls it"
    )
    raise NotAModuleError(f"the model is a {type(model).__name__}, not an nn.Module: {hint}")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; on exit every submodule has the flag it had, also where the flags were mixed."""
    flags = [(module, module.training) for module in model.modules()]
    if any(flag for _, flag in flags):
        model.eval()
    try:
        yield
    finally:
        if model.training is not flags[0][1]:
            model.train(flags[0][1])  # a model may do more than set flags here (merge weights, freeze norms)
        for module, flag in flags:
            module.training = flag


@contextmanager
def preserved_buffers(model: nn.Module) -> Iterator[None]:
    """Put back the buffers that a forward pass overwrites (step counters, caches)."""
    saved = [(module, dict(module._buffers)) for module in model.modules()]
    copies = {id(buffer): buffer.clone() for _, buffers in saved for buffer in buffers.values() if buffer is not None}
    try:
        yield
    finally:
        for module, buffers in saved:
            module._buffers.update(buffers)
            for buffer in buffers.values():
                if buffer is not None:
                    with torch.no_grad():
                        buffer.copy_(copies[id(buffer)])


def run_eager(model: nn.Module, call: Call, tensors: Sequence[Tensor] | None = None) -> Outputs:
    """The model's own outputs, detached, for the call or the same call with other `tensors`."""
    args, kwargs = call.rebuild([tensor.clone() for tensor in (call.tensors if tensors is None else tensors)])
    with preserved_buffers(model), torch.no_grad():
        outputs = flatten_outputs(model(*args, **kwargs))
        # Clones: an output may be a buffer that is put back on exit.
        return Outputs(outputs.names, tuple(tensor.clone() for tensor in outputs.tensors), outputs.dropped)


def run_example(model: nn.Module, call: Call) -> Outputs:
    """The model's own outputs on the example. Raises InputError where the model itself fails on it, OutputError."""
    try:
        return run_eager(model, call)
    except OutputError:
        raise
    except Exception as error:  # the model's own code
        raise InputError(
            f"the model itself fails on the example arguments{blame(error, model)}: {first_line(error)}\n"
            "Pass arguments that model(*args, **kwargs) takes."
        ) from error
