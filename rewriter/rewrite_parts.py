"""A model whose own forward can't be traced, with its parts rewritten: still an instance of the user's class.

The new parameters live at the root, `residual.<stream>.<site>.<name>`, as everywhere; each part reads them from there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from torch import nn

from resfx.applying import RewriteError
from resfx.capture_errors import CaptureError
from resfx.parts import Part, joined, parts_note, place, rejected_in
from resfx.passes import Form, Plan
from resfx.passes.parameters import ParameterTree
from resfx.patterns import ResidualMap, Site, Stream
from resfx.rewritten import Rewritten
from resfx.selection import Select, Streams, chosen_streams, matching, predicate
from resfx.verify import trial_run

PlansFor: TypeAlias = Callable[[Sequence[Stream]], Sequence[Plan]]
RewritePart: TypeAlias = Callable[[nn.Module, Any, Any, PlansFor, bool], Rewritten]


@dataclass(frozen=True)
class Wish:
    """What the user asked for; stream numbers and paths are those of the whole model."""

    form: Form
    select: Select
    streams: Streams
    warm_start: bool

    @property
    def named(self) -> bool:
        return self.streams is not None or self.select is not None


def rewrite_parts(
    model: nn.Module,
    call: tuple[tuple[Any, ...], dict[str, Any]],
    parts: Sequence[Part],
    wish: Wish,
    rewrite_part: RewritePart,
    error: CaptureError,
) -> Rewritten:
    """`model` with its `parts` rewritten; `error` is why it was not captured as a whole. What `parts` hold belongs to the result.

    Errors: RewriteError where no part takes the form, a named one does not, or the model does not run with its parts rewritten;
    SelectionError, NoResidualFound.
    """
    found = [stream for part in parts for stream in part.streams]
    wanted = matching(found, chosen_streams(found, wish.streams, ()), wish.select, explicit=wish.streams is not None)
    done: dict[str, Rewritten] = {}
    refused: dict[int, str] = {}
    for part in parts:
        own = [index - part.first for index in wanted if index - part.first in range(len(part.found.streams))]
        if not own:
            continue
        try:
            done[part.path] = rewrite_part(part.module, part.args, part.kwargs, _plans(part, own, wish), wish.named)
        except RewriteError as refusal:
            if wish.named or (part is parts[-1] and not done):
                raise
            refused |= {part.first + index: str(refusal) for index in own}
    whole = _exchanged(model, {id(part.module): done[part.path] for part in parts if part.path in done}, {})
    result = _report(model, parts, done, refused, error)
    residual = ParameterTree()
    for part in parts:
        if part.path in done:
            _settle(part, done[part.path], residual)
    whole.add_module("residual", residual)
    whole.__dict__["residual_map"] = result
    _check_runs(whole, call, done)
    return cast(Rewritten, whole)  # what callers read of one: its residual_map


def _plans(part: Part, own: Sequence[int], wish: Wish) -> PlansFor:
    matches = predicate(wish.select)

    def local(site: Site) -> bool:
        return matches is None or matches(replace(site, path=joined(part.path, site.path)))

    chosen = None if matches is None else local
    return lambda streams: [Plan(streams[index], wish.form, chosen, wish.warm_start) for index in own]


def _exchanged(module: nn.Module, results: Mapping[int, nn.Module], known: dict[int, nn.Module]) -> nn.Module:
    """`module` with the submodules of `results` (by the id of what they replace) in place; what holds one is a shallow copy."""
    if id(module) in results:
        return results[id(module)]
    if not any(id(inner) in results for inner in module.modules()):
        return module
    if id(module) not in known:
        known[id(module)] = new = type(module).__new__(type(module))
        new.__dict__.update(module.__dict__)
        new.__dict__["_modules"] = {
            name: None if child is None else _exchanged(child, results, known)
            for name, child in module._modules.items()
        }
    return known[id(module)]


def _settle(part: Part, result: Rewritten, residual: ParameterTree) -> None:
    """The part's new parameters move to the root's tree; its attributes and methods stay there for the code around it."""
    tree = result._modules.pop("residual", None)  # None: a form may need no parameter for so few sites
    if isinstance(tree, ParameterTree):
        result.__dict__["residual"] = tree  # read by its code, listed by the root alone
        for name, child in tree._modules.items():
            residual.add_module(str(part.first + int(name)), child)
    for name, value in vars(part.module).items():
        if name != "forward":  # one set on the instance, which would run in place of the rewritten one
            result.__dict__.setdefault(name, value)
    if not isinstance(part.module, Iterable):  # it would count children of the result's own
        result.stand_in_for(type(part.module))


def _report(
    model: nn.Module, parts: Sequence[Part], done: Mapping[str, Rewritten], refused: dict[int, str], error: CaptureError
) -> ResidualMap:
    streams: list[Stream] = []
    notes = [parts_note(model, [part.path for part in parts], error)]
    modules = tuple(path for path, _ in model.named_modules(remove_duplicate=False))
    total = ResidualMap(streams, rejected_in(parts), notes, refused, modules=modules)
    for part in parts:
        if part.path not in done:
            streams += part.streams
            continue
        own = done[part.path].residual_map
        place(done[part.path].graph, part.path)
        streams += [_global(stream, part) for stream in own.streams]
        notes += [f"`{part.path}`: {note}" for note in own.notes]
        total.refused.update({part.first + index: reason for index, reason in own.refused.items()})
        total.forms.update({part.first + index: form for index, form in own.forms.items()})
        total.chosen.update({part.first + index: sites for index, sites in own.chosen.items()})
        total.parameters.update({_renumbered(name, part.first): shape for name, shape in own.parameters.items()})
        for kind, count in own.changes.items():
            total.changes[kind] = total.changes.get(kind, 0) + count
    return total


def _global(stream: Stream, part: Part) -> Stream:
    for site in stream.sites:
        site.path = joined(part.path, site.path)
    return replace(stream, index=part.first + stream.index)


def _renumbered(name: str, first: int) -> str:
    head, number, rest = name.split(".", 2)
    return f"{head}.{first + int(number)}.{rest}"


def _check_runs(whole: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]], done: Mapping[str, Rewritten]) -> None:
    """Errors: RewriteError where the code around the parts needs more of them than calls, or reaches the originals."""
    called: set[int] = set()
    with contextlib.ExitStack() as stack:
        for part in done.values():
            stack.callback(part.register_forward_pre_hook(lambda module, args: called.add(id(module))).remove)
        try:
            trial_run(whole, *call)
        except Exception as error:
            raise RewriteError(
                f"{type(whole).__name__} does not run with {', '.join(f'`{path}`' for path in done)} rewritten:"
                f" {type(error).__name__}: {error}. Rewrite these submodules themselves"
            ) from error
    missed = [path for path, part in done.items() if id(part) not in called]
    if missed:
        raise RewriteError(
            f"{type(whole).__name__} does not call its submodule `{missed[0]}` where its class keeps it; rewrite that submodule itself"
        )
