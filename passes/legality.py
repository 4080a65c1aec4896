"""Which streams a form can take. Decided before any edit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from resfx.passes.editor import Editor, value_of
from resfx.passes.form import Form
from resfx.passes.layouts import read_step
from resfx.passes.terms import has_plain_skip
from resfx.patterns.dialect import source_of
from resfx.patterns.event_nodes import early_reader
from resfx.patterns.streams import Layout, Site, Stream, Write


def reason_to_refuse(editor: Editor, stream: Stream, form: Form, chosen: Sequence[Site]) -> str | None:
    """Why `form` can't rewrite the `chosen` sites of `stream`; None where it can."""
    if stream.refused is not None:
        return stream.refused
    if not chosen:
        return "no site of it is selected"
    for site in chosen:
        reason = _refused_site(site)
        if reason is not None:
            return reason
    return (
        _refused_part(stream, chosen)
        or _refused_axis(stream, form)
        or _refused_layout(editor, stream)
        or form.refuse(stream)
    )


def _place_of(site: Site) -> str:
    return f"site {site.index} ({site.path or 'root'}, {site.source or 'no source line'})"


def _refused_site(site: Site) -> str | None:
    where = _place_of(site)
    if site.refused is not None:
        return f"{where}: {site.refused}; leave it out with select="
    if site.region and not has_plain_skip(site):
        return f"{where} scales a slice of the state in its sum (by {site.skip_scale}), but not the rest of it"
    if not site.terms:
        return f"{where} has no update beside the skip"
    if not value_of(site.result).dtype.is_floating_point:
        return f"{where} has dtype {value_of(site.result).dtype}; residual forms need a real floating dtype"
    return None


def _refused_part(stream: Stream, chosen: Sequence[Site]) -> str | None:
    for event in stream.events:
        if not isinstance(event, Write) or event.site not in chosen:
            continue
        reader = early_reader(event)
        if reader is None:
            continue
        return (
            f"{_place_of(event.site)} updates a part of the state, which {reader.name} ({source_of(reader) or 'no source line'})"
            " reads before it is put back: there is no whole state to read from; leave the site out with select="
        )
    return None


def _refused_axis(stream: Stream, form: Form) -> str | None:
    if not form.needs_axis:
        return None
    if stream.axis is None:
        return "its feature axis can't be told (no Linear, norm or convolution shows it)"
    size = value_of(stream.entry).shape[stream.axis]
    if isinstance(size, torch.SymInt) and size.node.maybe_as_int() is None:
        return f"its feature axis {stream.axis} has the open size {size}; parameters need a fixed one"
    return None


def _refused_layout(editor: Editor, stream: Stream) -> str | None:
    for event in stream.events:
        if not isinstance(event, Layout):
            continue
        before = editor.entry_of(event.before, event.after, ())
        if read_step(editor.graph_module, before, event.after) is None:
            return f"{event.after.name} changes its layout in a way that can't be undone"
    return None
