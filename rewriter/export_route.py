"""The `torch.export` route: an ExportedProgram becomes a flat graph on the user's own parameters."""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from resfx.capture_errors import CaptureError
from resfx.equal_reads import merge_equal_reads
from resfx.export.symbolic import assumptions
from resfx.functionalize import Functional, functionalize, written_arguments
from resfx.grad_mode import cut_gradients
from resfx.guards import Guards, build_guards
from resfx.indexed_adds import spell_out_indexed_adds
from resfx.joined_parts import read_parts_of_the_whole
from resfx.regions import inline_regions
from resfx.root import add_constant, graft, graph_target, take_over
from resfx.tidy import forget_kept_dtypes
from resfx.tracepoints import Tracepoint, resolve_tracepoints

_PLACED = (InputKind.PARAMETER, InputKind.BUFFER)


@dataclass
class Unlifted:
    """The flat graph of an exported program. `origin[(graph, name)]` finds today's node by its name in the export;
    `graph` is 0 for the top level, else the number of the region it came from.
    """

    module: fx.GraphModule
    inputs: list[fx.Node]
    origin: dict[tuple[int, str], fx.Node]
    parents: dict[int, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    functional: Functional = field(default_factory=Functional)
    tracepoints: list[Tracepoint] = field(default_factory=list)


def unlift(program: torch.export.ExportedProgram, model: nn.Module) -> Unlifted:
    """Parameters and buffers become `get_attr` of the user's names, regions are inlined, asserts removed."""
    module = graft(model)
    graph = fx.Graph()
    env: dict[fx.Node, Any] = {}
    inputs = _user_placeholders(program, graph, env)
    _attributes(program, module, graph, env)
    origin: dict[tuple[int, str], fx.Node] = {(0, old.name): new for old, new in env.items() if new is not None}
    bodies: list[str] = []
    _body(program, module, graph, env, origin, bodies)
    module.graph = graph
    result = Unlifted(module, inputs, origin)
    inline_regions(module, bodies, origin, result.parents, result.notes)
    result.tracepoints = resolve_tracepoints(module.graph, origin)
    arguments = _arguments(program, result)
    remove_asserts(module.graph, arguments)
    forget_kept_dtypes(module.graph)
    result.functional = functionalize(module)
    result.functional.merged = merge_equal_reads(module)
    spell_out_indexed_adds(module.graph)
    result.functional.rejoined = read_parts_of_the_whole(module.graph)
    result.notes.extend(result.functional.notes)
    if cut_gradients(module.graph):
        result.notes.append("some operations run with gradients off; their inputs are detached")
    remove_dead(module.graph, arguments | result.functional.written_to(arguments))
    return result


def _arguments(program: torch.export.ExportedProgram, unlifted: Unlifted) -> set[fx.Node]:
    """What the calls with a kept signature are given: needed when they are folded, also where only its sizes count."""
    signatures = [entry.signature for entry in program.module_call_graph if entry.fqn and entry.signature is not None]
    names = {a.name for signature in signatures for a in signature.inputs if not isinstance(a, ConstantArgument)}
    values = {value for point in unlifted.tracepoints for value in point.values if isinstance(value, fx.Node)}
    return values | {node for (_, name), node in unlifted.origin.items() if name in names}


def _user_placeholders(
    program: torch.export.ExportedProgram, graph: fx.Graph, env: dict[fx.Node, Any]
) -> list[fx.Node]:
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    found = []
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is not InputKind.USER_INPUT:
            continue
        if isinstance(spec.arg, ConstantArgument) or not isinstance(node.meta.get("val"), torch.Tensor):
            env[node] = None
            continue
        new = graph.placeholder(node.name)
        new.target = new.name  # an argument `torch` must not hide what generated code calls so
        new.meta = copy.copy(node.meta)
        env[node] = new
        found.append(new)
    return found


def _attributes(
    program: torch.export.ExportedProgram, module: fx.GraphModule, graph: fx.Graph, env: dict[fx.Node, Any]
) -> None:
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind is InputKind.USER_INPUT or not node.users:
            continue
        target = spec.target or node.name
        if spec.kind is InputKind.CONSTANT_TENSOR:
            # A tensor literal, or a plain tensor attribute that is no buffer.
            target = add_constant(module, node.name, program.constants[target])
        elif spec.kind not in _PLACED:
            raise CaptureError(
                f"the export route met a {spec.kind.name.lower()} input `{target}`,"
                " which a rewritten module can't hold. Remove the custom object from the model, or use frontend='fx'."
            )
        else:
            target = graph_target(module, target)
        new = graph.get_attr(target)
        new.name = node.name
        new.meta = copy.copy(node.meta)
        env[node] = new


def _body(
    program: torch.export.ExportedProgram,
    module: fx.GraphModule,
    graph: fx.Graph,
    env: dict[fx.Node, Any],
    origin: dict[tuple[int, str], fx.Node],
    bodies: list[str],
) -> None:
    for node in program.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            _output(program, node, graph, env)
            continue
        if node.op == "get_attr":
            new = _subgraph(program, node, module, graph)
            bodies.append(str(new.target))
        else:
            new = graph.node_copy(node, lambda old: env[old])
        env[node] = new
        origin[(0, node.name)] = new


def _subgraph(program: torch.export.ExportedProgram, node: fx.Node, module: fx.GraphModule, graph: fx.Graph) -> fx.Node:
    """The body of a higher-order op (a region, a branch of cond) moves over under a free name."""
    target = str(node.target)
    new = graph.get_attr(take_over(module, program.graph_module, target, target))
    new.meta = copy.copy(node.meta)
    return new


def _output(program: torch.export.ExportedProgram, node: fx.Node, graph: fx.Graph, env: dict[fx.Node, Any]) -> None:
    values = []
    for spec, value in zip(program.graph_signature.output_specs, node.args[0], strict=True):  # type: ignore[arg-type]
        if spec.kind is not OutputKind.USER_OUTPUT:
            raise CaptureError(
                f"the export route met an output of kind {spec.kind.name} ({spec.target})."
                " Assign that state in place instead."
            )
        values.append(env[value] if isinstance(value, fx.Node) else value)
    new = graph.output(tuple(values))
    new.meta = copy.copy(node.meta)


_ASSERTS = (
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
    "_check_is_size",
)


def remove_asserts(graph: fx.Graph, keep: Collection[fx.Node]) -> None:
    """Drop run-time assertions, and what they alone read; what they say about inputs is checked once at entry."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        if str(getattr(node.target, "__name__", node.target)).split(".")[0] in _ASSERTS:
            graph.erase_node(node)
    remove_dead(graph, keep)


_PURE_MODULES = ("_operator", "operator", "math", "builtins", "torch", "resfx.fold", "resfx.grad_mode")


def remove_dead(graph: fx.Graph, keep: Collection[fx.Node] = ()) -> None:
    """Erase unused nodes; placeholders, nodes with an effect and those of `keep` stay."""
    graph.eliminate_dead_code(is_impure_node=lambda node: node in keep or has_effect(node))


def has_effect(node: fx.Node) -> bool:
    """Is the node needed even if nobody reads it? A random draw is: it moves the generator on."""
    if node.op in ("placeholder", "output"):
        return True
    if written_arguments(node):
        return True
    if node.op != "call_function":
        return node.op == "call_module" or node.is_impure()
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags
    # A Python function may set a mode (autocast, a vmap level); only arithmetic is known to do nothing else.
    return getattr(target, "__module__", None) not in _PURE_MODULES or node.is_impure()


def input_guards(inputs: list[fx.Node], labels: list[str], program: torch.export.ExportedProgram) -> Guards:
    """What the export assumed about its inputs."""
    values = [node.meta["val"] for node in inputs]
    return build_guards(labels, values, dict(program.range_constraints), assumptions(values))
