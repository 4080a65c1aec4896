"""The entry to the passes: rewrites streams of a graph into residual forms, then checks the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from resfx.passes.check import check
from resfx.passes.editor import Editor
from resfx.passes.errors import Refusal
from resfx.passes.form import Form
from resfx.passes.legality import reason_to_refuse
from resfx.passes.loops import Loops
from resfx.passes.parameters import ModuleParameters, Parameters
from resfx.passes.schedule import group_reads
from resfx.passes.walk import Plan, Select, Walk
from resfx.patterns.streams import Stream


@dataclass(frozen=True)
class Applied:
    """What a rewrite of one stream did: sites chosen, parameters added, and how often each kind of edit was made."""

    stream: int
    form: str
    sites: tuple[int, ...]
    parameters: tuple[str, ...]
    counts: dict[str, int]


def apply(
    graph_module: GraphModule,
    stream: Stream,
    form: Form,
    *,
    select: Select | None = None,
    warm_start: bool = False,
    prefix: str = "residual",
    parameters: Parameters | None = None,
) -> Applied | Refusal:
    """Rewrite one stream of `graph_module` in place and check the result. Errors: CheckError, EditError."""
    plan = Plan(stream, form, select, warm_start)
    return apply_all(graph_module, [plan], prefix=prefix, parameters=parameters)[0]


def apply_all(
    graph_module: GraphModule,
    plans: list[Plan],
    *,
    prefix: str = "residual",
    parameters: Parameters | None = None,
    streams: Sequence[Stream] = (),
) -> list[Applied | Refusal]:
    """Rewrite several streams of one graph; results in the order of `plans`. Errors: CheckError, EditError.

    Streams that enclose others go first: an inner stream then starts from what the outer one lets it read. `streams`
    are all streams of the graph, planned or not: those that run through a body forbid to repeat it.
    """
    editor = Editor(graph_module)
    loops = Loops(editor, plans, streams)
    position = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    store = parameters if parameters is not None else ModuleParameters(graph_module)

    def outermost_first(index: int) -> tuple[int, int]:
        stream = plans[index].stream
        last = stream.events[-1].after if stream.events else stream.entry
        return position[stream.entry], -position[last]

    results: dict[int, Applied | Refusal] = {}
    for index in sorted(range(len(plans)), key=outermost_first):
        results[index] = _apply_one(editor, plans[index], prefix, store, loops)
    editor.erase_dead()
    group_reads(editor)
    names = [name for result in results.values() if isinstance(result, Applied) for name in result.parameters]
    check(editor, names)
    if loops.cut(prefix):
        check(editor, names)
    graph_module.recompile()
    return [results[index] for index in range(len(plans))]


def _apply_one(editor: Editor, plan: Plan, prefix: str, store: Parameters, loops: Loops) -> Applied | Refusal:
    chosen = [site for site in plan.stream.sites if plan.select is None or plan.select(site)]
    reason = reason_to_refuse(editor, plan.stream, plan.form, chosen) or loops.refuse(plan)
    if reason is not None:
        return Refusal(plan.stream.index, plan.form.to_spec(), reason)
    numbers = tuple(site.index for site in chosen)
    walk = Walk(editor, plan, frozenset(numbers), prefix, store, loops.runs(plan))
    walk.run()
    loops.add(plan, walk.entry, walk.current)
    return Applied(plan.stream.index, plan.form.to_spec(), numbers, tuple(walk.stage.names), dict(walk.counts))
