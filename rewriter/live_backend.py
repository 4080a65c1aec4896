"""The Dynamo backend of one attached model: each graph is searched, matched, rewritten, and handed to the real backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from resfx.attached import Attachment
from resfx.live_cache import cacheable
from resfx.live_graph import LiveGraph
from resfx.live_known import KnownStream, LiveError
from resfx.live_match import at_known_places, match
from resfx.passes import Plan, Refusal, apply_all
from resfx.passes.editor import Editor
from resfx.passes.parameters import ParameterSpec
from resfx.patterns import Site, Stream, search
from resfx.patterns.alive import ancestors, living
from resfx.twins import written_arguments

Compiled = Callable[..., Any]


class LiveBackend:
    """What Dynamo calls with every graph that it captured from the attached model."""

    def __init__(self, attachment: Attachment, inner: Callable[..., Any]) -> None:
        self.attachment, self.inner = attachment, inner

    def __call__(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        try:
            return self._compile(graph_module, example_inputs)
        except Exception as error:
            # Dynamo may be told to run plainly where a backend fails: the call must not go unnoticed.
            self.attachment.failure = self.attachment.failure or error
            raise

    def _compile(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        attachment = self.attachment
        attachment.look_around()
        attachment.note_break(getattr(graph_module, "compile_subgraph_reason", None))
        graph = LiveGraph(graph_module, example_inputs, attachment.model)
        graph.prepare()
        live = ancestors(node for node in graph.graph.nodes if node.op == "output" or written_arguments(node))
        sums = at_known_places((node for node in graph.graph.nodes if node in live), attachment.streams)
        names = graph.parameters()
        if not sums and not attachment.may_hold(names.values()):
            return self._plain(graph_module, example_inputs)
        found = search(graph.module).streams
        alive = [living(stream, live) for stream in found]
        pairs = match(sums, alive, attachment.by_turn(), names, attachment.broke)
        if not pairs:
            return self._plain(graph_module, example_inputs)
        _rewrite(graph, attachment, pairs, found)
        result, inputs = graph.finish()
        with cacheable(result.graph, {stream.form for stream, _ in pairs}):
            compiled = self.inner(result, inputs)
        return _bound(attachment, compiled, graph.added, [stream.index for stream, _ in pairs])

    def _plain(self, graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        compiled: Compiled = self.inner(graph_module, list(example_inputs))
        return compiled


def _rewrite(
    graph: LiveGraph, attachment: Attachment, pairs: Sequence[tuple[KnownStream, Stream]], found: Sequence[Stream]
) -> None:
    if attachment.parameters():
        graph.module.add_module("residual", attachment.model.get_submodule("residual"))
    plans = [Plan(twin, stream.form, _chosen(stream), stream.warm) for stream, twin in pairs]
    outcomes = apply_all(graph.module, plans, parameters=_Existing(attachment), streams=found)
    graph.module._modules.pop("residual", None)
    refused = [outcome for outcome in outcomes if isinstance(outcome, Refusal)]
    if refused:
        raise LiveError(f"this call can't be rewritten as the example of attach was: {refused[0]}")


def _chosen(stream: KnownStream) -> Callable[[Site], bool]:
    return lambda site: site.index in stream.chosen


class _Existing:
    """The parameters that attach made. A graph that asks for one that is not there reads the stream at another place."""

    def __init__(self, attachment: Attachment) -> None:
        self._own = attachment.parameters()

    def node(self, editor: Editor, name: str, spec: ParameterSpec, site: Site) -> fx.Node:
        """A get_attr of the parameter. Errors: LiveError where attach made none of that name."""
        if name not in self._own:
            raise LiveError(
                f"this call needs the parameter {name}, which the example of attach had no use for: it reads the stream at a place"
                f" near {site.path or 'the root'}, {site.source}, that the example did not (hidden states as outputs, for one)."
                " Attach with an example that reads it too"
            )
        return editor.attribute(name, self._own[name])


def _bound(attachment: Attachment, compiled: Compiled, names: Sequence[str], streams: Sequence[int]) -> Compiled:
    """`compiled` with the new parameters as its last arguments, as they are at every call."""

    def run(*inputs: Any) -> Any:
        for stream in streams:
            attachment.runs[stream] += 1
        own = attachment.parameters()
        return compiled(*inputs, *(own[name] for name in names))

    return run
