"""What an earlier rewrite left in a graph: which stream has which form. It survives saving, loading and another export."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from resfx.passes.marks import marks_of, note_of
from resfx.patterns.streams import Stream


def rewritten_forms(graph: fx.Graph) -> dict[int, str]:
    """Stream -> form of the rewrites that made the graph, by the streams' numbers of then."""
    return {note["stream"]: note["form"] for node in graph.nodes if (note := note_of(node))}


def forms_of(streams: Iterable[Stream], graph: fx.Graph) -> dict[int, str]:
    """The form that each of the streams found in `graph` already has; plain ones are left out."""
    forms = rewritten_forms(graph)
    found = {}
    for stream in streams:
        nodes = [node for site in stream.sites for node in (site.node, site.skip, *site.branches)]
        earlier = {mark["stream"] for node in nodes for mark in marks_of(node)}
        named = [forms[index] for index in sorted(earlier) if index in forms]
        if named:
            found[stream.index] = ", ".join(named)
    return found


def already(forms: dict[int, str]) -> str:
    """The sentence that says so."""
    listed = ", ".join(f"stream {stream} to {form}" for stream, form in sorted(forms.items()))
    return f"rewritten already: {listed}"
