"""The static rewrite of an attached model, on its own tensors, for as long as something wants to look at a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from resfx.attached import Attachment
from resfx.live import attachment_of, put_on, take_off
from resfx.live_known import KnownStream, LiveError
from resfx.passes import Plan
from resfx.patterns import Site, Stream
from resfx.rewrite import Call, rewrite_by
from resfx.rewritten import Rewritten


@contextmanager
def as_static(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Rewritten]:
    """Within, the attached `model` is plain, and the result is its static rewrite: the same streams, the same Parameters.

    Errors: LiveError where the call has other streams than the example of attach had; as `rewrite`.
    """
    attachment = attachment_of(model)
    assert attachment is not None
    tree = model._modules.get("residual")
    gates = take_off(attachment)
    try:
        static = rewrite_by(
            model, Call(tuple(args), dict(kwargs)), lambda found: _plans(attachment, found), insist=True
        )
        _share(tree, static)
        yield static
    finally:
        put_on(attachment, tree, gates)


def _plans(attachment: Attachment, found: Sequence[Stream]) -> list[Plan]:
    for known in attachment.streams:
        paths = [site.path for site in found[known.index].sites] if known.index < len(found) else []
        if paths[: len(known.sites)] != [site.path for site in known.sites]:
            raise LiveError(
                f"stream {known.index} of the example of attach ({known.sites[0].path or 'the root'}, {known.sites[0].source})"
                " is not in this call; call it as attach's example was"
            )
    return [_plan(known, found[known.index]) for known in attachment.streams]


def _plan(known: KnownStream, stream: Stream) -> Plan:
    def chosen(site: Site) -> bool:
        return site.index in known.chosen

    return Plan(stream, known.form, chosen, known.warm)


def _share(tree: nn.Module | None, static: Rewritten) -> None:
    if tree is None:
        return
    names = {name for name, _ in tree.named_parameters()}
    for name, _ in static.residual.named_parameters():
        if name not in names:
            raise LiveError(
                f"this call needs the parameter residual.{name}, which the example of attach had no use for: attach with an"
                " example that reads the stream there too"
            )
    static._modules["residual"] = tree
