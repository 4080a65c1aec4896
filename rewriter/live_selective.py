"""Checkpointed regions with a policy of their own are put together again, behind the rewrite.

A policy is asked about every operation that AOTAutograd makes of a region: it needs the region as one, with what the form put in.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from resfx.root import free_name

REGION = "ac_graph_id"  # torch's own key: the number of the innermost region that a node belongs to
POLICY = "resfx_policy"  # the region's context_fn
_CONTEXT_FN = "_checkpoint_context_fn"  # where Dynamo leaves it, and AOTAutograd looks for it

Run = tuple[Callable[[], Any], list[fx.Node]]


def policy_of(body: fx.GraphModule) -> Callable[[], Any] | None:
    """The `context_fn` that torch.utils.checkpoint was given for the region; None where it was given none."""
    found: Callable[[], Any] | None = body.meta.get(_CONTEXT_FN)
    return found


def close_regions(module: fx.GraphModule) -> None:
    """Every run of nodes of one region with a policy becomes one node. What stands between them belongs to the region."""
    for policy, nodes in _runs(module.graph):
        _close(module, policy, nodes)


def run_region(body: fx.GraphModule, *operands: Any) -> Any:
    """A region in a graph: checkpointed where AOTAutograd traces it.

    Run as it is (backend="eager"), torch would compute it again with other random numbers: there it is no region.
    """
    if not _is_traced():
        return body(*operands)
    from torch._higher_order_ops.wrap import tag_activation_checkpoint  # private: what Dynamo itself puts into a graph

    return tag_activation_checkpoint(body, *operands)


def _is_traced() -> bool:
    """Does a backend of Dynamo trace the graph that it was given? Private: torch.compiler.is_compiling of torch 2.11 says no."""
    return torch._guards.TracingContext.try_get() is not None


def _runs(graph: fx.Graph) -> list[Run]:
    runs: list[Run] = []
    number: int | None = None
    between: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        region = node.meta.get(REGION)
        if region is None:
            between.append(node)
            continue
        if POLICY in node.meta and region == number:
            runs[-1][1].extend([*between, node])
        elif POLICY in node.meta:
            runs.append((node.meta[POLICY], [node]))
        number, between = region, []
    return runs


def _close(module: fx.GraphModule, policy: Callable[[], Any], nodes: Sequence[fx.Node]) -> None:
    inside = set(nodes)
    results = [node for node in nodes if not inside.issuperset(node.users)]
    body, operands = _body(module, nodes, results)
    body.meta[_CONTEXT_FN] = policy
    name = free_name(module, "resfx_region")
    module.add_module(name, body)
    with module.graph.inserting_before(nodes[0]):
        region = module.graph.call_function(run_region, (module.graph.get_attr(name), *operands))
        region.meta = {"val": tuple(node.meta["val"] for node in results)}
        for index, node in enumerate(results):
            result = module.graph.call_function(operator.getitem, (region, index))
            result.meta = copy.copy(node.meta)
            node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        module.graph.erase_node(node)


def _body(
    module: fx.GraphModule, nodes: Sequence[fx.Node], results: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The nodes as a graph of their own, and what it is to be called with."""
    inside = set(nodes)
    outside = dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value not in inside)
    operands = [value for value in outside if value.op != "get_attr"]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for value in operands:
        env[value] = graph.placeholder(value.name)
    for node in [*outside.keys() - set(operands), *nodes]:
        env[node] = graph.node_copy(node, lambda n: env[n])
    for old, new in env.items():
        new.meta = copy.copy(old.meta)
    graph.output(tuple(env[node] for node in results))
    return fx.GraphModule(module, graph), operands
