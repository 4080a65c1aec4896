"""The `forward` of an attached model, and of the modules in it that hold a whole stream: calls go through the compiled model.

`generate` calls an encoder by itself, an adapter library calls `forward` directly: each such module has a gate of its own.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from resfx.attached import Attachment, is_running, running
from resfx.environment import plain_attention
from resfx.failure import call_failure
from resfx.live_backend import LiveBackend
from resfx.live_known import LiveError
from resfx.patterns import ResfxError

_DISABLED = "a model that resfx.attach has rewritten compiles itself"


class _Frame(nn.Module):
    """Runs the plain forward. As a module it leaves its mark in the module stack of every node it makes."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self._plain = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._plain(*args, **kwargs)


class LiveForward:
    """Stands in for `module.forward`. `streams` are those whose lowest common module this is."""

    def __init__(self, attachment: Attachment, path: str, streams: tuple[int, ...]) -> None:
        self.attachment, self.path, self.streams = attachment, path, streams
        module = attachment.model.get_submodule(path)
        self.had_own = "forward" in vars(module)
        self.plain = module.forward
        self._finish()

    def _finish(self) -> None:
        self.frame = _Frame(self.plain)
        # Another compiler must not look inside: it would compile the plain model. (Here, for the decorator imports Dynamo.)
        self.enter = torch.compiler.disable(_enter, reason=_DISABLED)  # type: ignore[no-untyped-call]
        _run_by_python(LiveForward.__call__)
        self.compiled: dict[Any, Callable[..., Any]] = {}
        self.__name__, self.__doc__ = "forward", self.plain.__doc__
        self.__signature__ = inspect.signature(self.plain)
        self.__code__ = getattr(self.plain, "__code__", None)  # libraries, torch.export too, ask a forward for it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.attachment.active:
            return self.plain(*args, **kwargs)
        if not is_running(self.attachment.key):
            return self.enter(self, args, kwargs)
        if torch.compiler.is_compiling():
            return self.plain(*args, **kwargs)
        return _checked(self, self.plain, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveForward:
        fresh = LiveForward.__new__(LiveForward)
        memo[id(self)] = fresh
        fresh.attachment = copy.deepcopy(self.attachment, memo)
        fresh.path, fresh.streams, fresh.had_own = self.path, self.streams, self.had_own
        fresh.plain = copy.deepcopy(self.plain, memo)
        fresh._finish()
        return fresh

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise LiveError(
            "an attached model can't be pickled: its compiled graphs belong to this process. Save its state_dict(), or"
            " resfx.detach it first"
        )


def _enter(gate: LiveForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call from outside: through the compiled model."""
    if torch.compiler.is_exporting():
        raise LiveError(
            "an attached model compiles itself and can't be captured: use resfx.rewrite for export and ONNX, with the parameters of"
            " this model's state_dict, or resfx.detach it first"
        )
    attachment = gate.attachment
    attachment.begin()
    with running(attachment), _tracing(), plain_attention:
        try:
            return _checked(gate, _compiled(gate), args, kwargs)
        except Exception as error:
            own = _own_error(error) or _failure_of_the_model(gate, error, args, kwargs)
            if own is None or own is error:
                raise
            raise own from (own.__cause__ or error)


def _run_by_python(function: Callable[..., Any]) -> None:
    """Dynamo inlines `function` where a graph leads through it, but starts no graph there, so that it sees what really ran.

    Private: torch.compiler.disable would keep Dynamo from inlining it too.
    """
    from torch._dynamo.eval_frame import skip_code

    skip_code(function.__code__)


def _tracing() -> AbstractContextManager[Any]:
    """How Dynamo traces an attached model: under DistributedDataParallel it would cut graphs at the borders of gradient buckets."""
    patched: AbstractContextManager[Any] = torch._dynamo.config.patch(optimize_ddp=False)
    return patched


def _checked(gate: LiveForward, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call, and see that the gate's streams ran rewritten: where Dynamo gives up it runs the model plainly, and silently."""
    attachment = gate.attachment
    before = dict(attachment.runs)
    result = function(*args, **kwargs)
    if attachment.failure is not None:
        raise LiveError(f"the rewritten model could not be compiled: {attachment.failure}") from attachment.failure
    plain = [stream for stream in gate.streams if attachment.runs[stream] == before[stream]]
    if plain:
        raise LiveError(_ran_plainly(gate, plain))
    return result


def _ran_plainly(gate: LiveForward, streams: list[int]) -> str:
    head = f"module `{gate.path or 'the root'}`: stream {', '.join(map(str, streams))} ran plainly"
    gate.attachment.note_break()
    broke = gate.attachment.broke
    causes = [] if broke is None else [f"Dynamo broke the graph within it (the last break: {broke})"]
    causes += [
        "Dynamo gave up on it after too many recompilations (set torch._dynamo.config.recompile_limit higher, or mark the sizes that"
        " change with torch._dynamo.mark_dynamic; TORCH_LOGS=recompiles tells which)",
        "Dynamo is switched off",
        "a torch.func transform is around the call (that needs resfx.rewrite)",
        "this call leaves it out (attach with streams= that every call runs)",
    ]
    return f"{head}. Either {', or '.join(causes)}"


def _own_error(error: BaseException) -> ResfxError | None:
    """The error of ours that Dynamo wrapped into one of its own."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, ResfxError):
            return link
        link = getattr(link, "inner_exception", None) or link.__cause__
    return None


def _failure_of_the_model(
    gate: LiveForward, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LiveError | None:
    """Where Dynamo could not run an operator: what the plain model says of the same call, with its module and line."""
    if not isinstance(error, torch._dynamo.exc.TorchRuntimeError):
        return None
    attachment = gate.attachment
    attachment.active = False
    try:
        with torch.no_grad():
            gate.plain(*args, **kwargs)
    except Exception as plain:
        own = LiveError(call_failure(plain, attachment.model))
        own.__cause__ = plain
        return own
    finally:
        attachment.active = True
    return None


def _compiled(gate: LiveForward) -> Callable[..., Any]:
    """The compiled model; one for each state of the new parameters that Dynamo's guards do not see."""
    state = gate.attachment.state()
    if state not in gate.compiled:
        backend = LiveBackend(gate.attachment, inner_backend(gate.attachment.backend))
        gate.compiled[state] = torch.compile(_own_code(gate.frame), backend=backend)
    return gate.compiled[state]


def _own_code(frame: _Frame) -> Callable[..., Any]:
    """A function with a code object of its own: Dynamo counts recompilations by code object, for all models together."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return frame(*args, **kwargs)

    return types.FunctionType(run.__code__.replace(), run.__globals__, run.__name__, None, run.__closure__)


def inner_backend(backend: str | Callable[..., Any]) -> Callable[..., Any]:
    """The compiler that gets the rewritten graphs. Errors: LiveError for a name that torch does not know."""
    if callable(backend):
        return backend
    from torch._dynamo import list_backends, lookup_backend

    try:
        found: Callable[..., Any] = lookup_backend(backend)
    except Exception as error:
        known = ", ".join(sorted({*list_backends(), "eager", "aot_eager"}))
        raise LiveError(f"unknown backend {backend!r}; torch has {known}, or pass a function") from error
    return found
