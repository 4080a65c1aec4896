"""`attach` and `detach`: the live mode. The model stays the user's own; what Dynamo captures from it is rewritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from resfx.attached import Attachment, Backend
from resfx.capture import check_module, example_call
from resfx.live_forward import LiveForward, inner_backend
from resfx.live_known import LiveError, owner_path, settle
from resfx.live_registered import register
from resfx.passes import Form
from resfx.patterns import ResidualMap
from resfx.rewrite import check_form
from resfx.rewritten import Rewritten
from resfx.selection import Select, Streams


def attach(
    model: nn.Module,
    form: Form,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    backend: Backend = "inductor",
    select: Select = None,
    streams: Streams = None,
    warm_start: bool = False,
) -> ResidualMap:
    """Let every call of `model` run with its residual connections rewritten into `form`: any shape, dtype, cache or mode.

    The arguments are those of `rewrite`; the example call decides streams and parameters, which are registered on the model under
    the same names (`residual.<stream>.<site>.<name>`), so that a state_dict fits both. `backend` compiles the rewritten graphs: a
    name that torch.compile knows ("eager" for debugging), or a function. `generate`, training and adapters work as before. Its
    state_dict (what `save_pretrained` writes too) has the new parameters: build the plain model, attach, then load the state_dict.

    Attach before the model goes to DistributedDataParallel or an optimizer: both must see the new parameters.
    Returns what was found and changed. Errors: LiveError, FormError; NoResidualFound, SelectionError, CaptureError as in `rewrite`.
    A call that can't be rewritten raises LiveError: a graph break within a stream, for one, by its line.
    """
    _check(model, form)
    inner_backend(backend)
    register()
    with torch.inference_mode(False):  # the new parameters are to be trained, wherever they were made
        positional, keyword = example_call(args, kwargs)
        settled = settle(model, form, positional, keyword, select, streams, warm_start)
    _check_call(model, positional, keyword)
    attachment = Attachment(model, settled.streams, backend, settled.residual_map)
    owners: dict[str, list[int]] = {"": []}
    for stream in settled.streams:
        owners.setdefault(owner_path(stream.sites), []).append(stream.index)
    gates = [LiveForward(attachment, path, tuple(indices)) for path, indices in owners.items()]
    put_on(attachment, settled.parameters, gates)
    return settled.residual_map


def detach(model: nn.Module) -> nn.Module:
    """Give the plain model back: the same object, without the new parameters. Its own parameters stay as trained.

    Errors: LiveError where `model` is not attached.
    """
    attachment = attachment_of(model)
    if attachment is None:
        raise LiveError(
            f"this {type(model).__name__} is not attached; pass the very module that resfx.attach was given"
        )
    take_off(attachment)
    return model


def take_off(attachment: Attachment) -> list[LiveForward]:
    """Make the attached model plain. Returns its gates, for `put_on`."""
    attachment.active = False
    gates: list[LiveForward] = []
    for module in attachment.model.modules():
        gate = vars(module).get("forward")
        if not isinstance(gate, LiveForward) or gate.attachment is not attachment:
            continue
        gates.append(gate)
        if gate.had_own:
            module.forward = gate.plain
        else:
            del module.forward
    attachment.model._modules.pop("residual", None)
    return gates


def put_on(attachment: Attachment, parameters: nn.Module | None, gates: Sequence[LiveForward]) -> None:
    """Let the calls of the attached model run rewritten, with `parameters` as the new ones."""
    if parameters is not None:
        attachment.model.add_module("residual", parameters)
    for gate in gates:
        attachment.model.get_submodule(gate.path).forward = gate
    attachment.active = True


def attachment_of(model: nn.Module) -> Attachment | None:
    """The attachment of `model`; None where it has none. What was put over its forward since is looked through."""
    gate: Any = vars(model).get("forward")
    while gate is not None and not isinstance(gate, LiveForward):
        gate = getattr(gate, "__wrapped__", None)
    return gate.attachment if isinstance(gate, LiveForward) and gate.attachment.active else None


class _Arrived(BaseException):
    """A call came to the model's forward. No Exception: a model may catch those."""


def _check_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """See that a call of a model with a `__call__` of its own comes to its `forward`, where the gate is."""
    if type(model).__call__ is nn.Module.__call__:
        return

    def arrive(*_args: Any, **_kwargs: Any) -> Any:
        raise _Arrived

    own = vars(model).get("forward")
    model.forward = arrive
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    except _Arrived:
        return
    finally:
        del model.forward
        if own is not None:
            model.forward = own
    raise LiveError(
        f"{type(model).__name__} has a `__call__` of its own, which does not come to `forward` with the example: calls would run"
        " plainly. Let it call `super().__call__`, or attach a module that holds the streams and is called by it"
    )


def _check(model: nn.Module, form: Form) -> None:
    check_module(model)
    check_form(form)
    if isinstance(model, Rewritten):
        raise LiveError("the model is rewritten already, as a captured graph; attach the original (resfx.revert)")
    if attachment_of(model) is not None:
        raise LiveError("the model is attached already; resfx.detach it first")
    within = [path for path, module in model.named_modules() if attachment_of(module) is not None]
    if within:
        raise LiveError(f"module `{within[0]}` is attached already; resfx.detach that module first, or attach it alone")
    if hasattr(model, "residual"):
        raise LiveError(
            f"{type(model).__name__} already has an attribute `residual`, where the new parameters go; rename it before attach"
        )
