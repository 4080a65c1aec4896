"""Changing at run time how often a stream repeats (`ScaledLoop(loops=K)`), without a new capture."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from resfx.passes import Plan
from resfx.passes.repeat import Repeat, repeat_path
from resfx.patterns import ResfxError

if TYPE_CHECKING:
    from resfx.rewritten import Rewritten


class LoopError(ResfxError):
    """The stream is not one whose loops can be set."""


def set_loops(model: Rewritten, stream: int, loops: int) -> None:
    """Let `stream` (a number of the residual map) run `loops` times. Errors: LoopError, FormError where loops < 1.

    The model's plans and residual map say so from then on.
    """
    plans, found = model.origin.plans, model.residual_map
    plan = _repeated(plans, stream)
    changed: Any = replace(plan, form=replace(plan.form, loops=loops))  # type: ignore[call-arg]
    repeat = model.get_submodule(repeat_path("residual", stream))
    assert isinstance(repeat, Repeat)
    repeat.count = loops
    plans = tuple(changed if other is plan else other for other in plans)
    forms = {**found.forms, stream: changed.form.to_spec()}
    model.__dict__["_origin"] = replace(model.origin, plans=plans)
    model.__dict__["_residual_map"] = replace(found, forms=forms)


def _repeated(plans: tuple[Plan, ...], stream: int) -> Plan:
    repeated = {plan.stream.index: plan for plan in plans if plan.form.loop_count is not None}
    if stream in repeated:
        return repeated[stream]
    if repeated:
        listed = ", ".join(str(index) for index in sorted(repeated))
        raise LoopError(f"stream {stream} has no loops to set; the streams rewritten with loops= are: {listed}")
    raise LoopError(f"stream {stream} has no loops to set: rewrite it into ScaledLoop(loops=1) or more first")
