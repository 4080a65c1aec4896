"""`measure`: what every site of a model does in one call, without changing the model."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from resfx.capture import example_call
from resfx.environment import training_mode
from resfx.live import attachment_of
from resfx.live_static import as_static
from resfx.measure_report import Report, SiteReading
from resfx.passes import Standard
from resfx.patterns import ResfxError, Site
from resfx.rewrite import rewrite
from resfx.rewritten import Rewritten
from resfx.watching import Key, Recorder, Row, watched

Loss: TypeAlias = Callable[[Any], Tensor]


class MeasureError(ResfxError):
    """The model ran, and can't be measured as asked."""


def measure(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, loss: Loss | None = None
) -> Report:
    """Run `model(*args, **kwargs)` once and read, at every site, norms, cosines, routing weights, gates and gradients.

    `model`: a rewritten model, a module that holds one (a LoRA or a parallel wrapper), an attached model (its static rewrite is
    measured), or any plain model: that one is measured as `resfx.find` sees it. It runs in the mode it is in. `loss` takes the
    model's output and gives a scalar; without it the output's own `.loss` is used where it has one and gradients are on.
    Gradients are those of the updates.

    Parameters, their `.grad`, buffers, training flags and the state of the random generators are afterwards what they were.
    Errors: MeasureError; NoResidualFound and CaptureError for plain models.
    """
    arguments, keywords = example_call(args, kwargs)
    model = getattr(model, "_orig_mod", model)  # a compiled model: its graph is no longer to be seen from inside
    with _unchanged(model), _runner(model, arguments, keywords) as (runner, root):
        recorder = Recorder()
        with watched(root, recorder), torch.enable_grad() if loss is not None else contextlib.nullcontext():
            output = runner(*arguments, **keywords)
            value = _loss_of(output, loss)
            gradients = {} if value is None else _gradients(recorder, value)
    if not recorder.rows:
        raise MeasureError(
            f"{type(model).__name__} did not call its rewritten part: nothing was measured; call it with other arguments"
        )
    return _report(root, recorder, gradients, value)


@contextlib.contextmanager
def _runner(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[nn.Module, Rewritten]]:
    """What to call, and the rewritten model in it."""
    inside = [module for module in model.modules() if isinstance(module, Rewritten)]
    if len(inside) > 1:
        raise MeasureError(f"{type(model).__name__} holds {len(inside)} rewritten models; measure them one by one")
    attached = next((path for path, module in model.named_modules() if attachment_of(module) is not None), None)
    if attached:
        raise MeasureError(
            f"{type(model).__name__} holds an attached model: measure that one, its `{attached}`, as it is called there"
        )
    if inside:
        yield model, inside[0]
    elif attached is not None:
        with as_static(model, args, kwargs) as static:
            yield static, static
    else:
        plain = _as_found(model, args, kwargs)
        yield plain, plain


def _as_found(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rewritten:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="left plain")  # the report says so
        return rewrite(model, Standard(), args, kwargs, copy=False)


@contextlib.contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Buffers, training flags and random generators come back as they were."""
    kept = [(m, name, b, b.clone()) for m in model.modules() for name, b in m._buffers.items() if b is not None]
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.device.type == "cuda"}
    with training_mode(model, None), torch.random.fork_rng(sorted(d.index for d in devices)):
        try:
            yield
        finally:
            for module, name, buffer, value in kept:
                module._buffers[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.data.copy_(value)


def _loss_of(output: Any, loss: Loss | None) -> Tensor | None:
    value = getattr(output, "loss", None) if loss is None else loss(output)
    if loss is None and not (isinstance(value, Tensor) and value.requires_grad):
        return None
    if not isinstance(value, Tensor) or value.numel() != 1:
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise MeasureError(f"loss= must give a tensor with one element, not {what}; reduce it, as with .mean()")
    if not value.requires_grad:
        raise MeasureError(
            "loss= gave a value that does not depend on the model's updates; compute it from the output without detaching"
        )
    return value


def _gradients(recorder: Recorder, loss: Tensor) -> dict[Key, float]:
    """The norm of the loss's gradient in every update."""
    traced = {key: row.traced for key, row in recorder.rows.items() if row.traced is not None}
    if not traced:
        return {}
    found = torch.autograd.grad(loss.sum(), [value for value, _ in traced.values()], allow_unused=True)
    pairs = zip(traced.items(), found, strict=True)
    return {key: 0.0 if grad is None else float(grad.double().norm()) / abs(scale) for (key, (_, scale)), grad in pairs}


def _report(root: Rewritten, recorder: Recorder, gradients: dict[Key, float], loss: Tensor | None) -> Report:
    known = root.residual_map
    places = {(stream.index, site.index): site for stream in known.streams for site in stream.sites}
    rows = _complete(recorder.rows)
    readings = [_reading(key, row, places.get(key[:2]), gradients.get(key)) for key, row in rows.items()]  # type: ignore[arg-type]
    unmeasured = {s.index: known.refused.get(s.index) or s.refused or "it is not rewritten" for s in known.streams}
    unmeasured = {index: reason for index, reason in unmeasured.items() if index not in known.forms}
    ordered = sorted(readings, key=lambda reading: reading.stream)  # stable: the order of execution stays
    return Report(
        tuple(ordered), dict(sorted(known.forms.items())), unmeasured, None if loss is None else float(loss.detach())
    )


def _complete(rows: Mapping[Key, Row]) -> dict[Key, Row]:
    """The rows that tell of an execution. Where a body is repeated its first state is seen outside too, and what an outer
    stream takes from it is seen inside: the half rows of sites that have whole ones are left out."""
    whole = {key[:2] for key, row in rows.items() if _is_whole(row)}
    return {key: row for key, row in rows.items() if _is_whole(row) or key[:2] not in whole}


def _is_whole(row: Row) -> bool:
    return row.update is not None and (row.state is not None or row.read is not None)


def _reading(key: Key, row: Row, site: Site | None, gradient: float | None) -> SiteReading:
    stream, number, calls = key
    return SiteReading(
        stream,
        number,
        calls,
        site.path if site is not None else "",
        site.source if site is not None else "",
        stream_norm=_float(row.state if row.state is not None else row.read),
        update_norm=_float(row.update),
        cosine=_float(row.cosine),
        weight_max=_float(row.weight_max),
        weight_entropy=_float(row.weight_entropy),
        sources=row.sources or None,
        gate_mean=_float(row.gate),
        gradient_norm=gradient,
    )


def _float(value: Tensor | None) -> float | None:
    if value is None or math.isnan(number := float(value)):
        return None
    return number
