"""Checkpointed regions of a Dynamo graph become plain nodes that carry the marks of a region.

Dynamo keeps `torch.utils.checkpoint` as one node with a subgraph, and AOTAutograd later marks the nodes of that subgraph for
the partitioner. Inlined here with the same marks, a form can reach into the region, and what it held is still recomputed.
A region with a policy of its own says node by node what is kept: `live_selective` closes it again.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from resfx.live_selective import POLICY, REGION, policy_of
from resfx.root import take_over

_numbers = itertools.count(1_000_000)  # apart from the small numbers that torch gives its own regions


def inline_checkpoints(module: fx.GraphModule) -> None:
    """Inline every checkpointed region of `module.graph`, nested ones too."""
    found = True
    while found:
        found = False
        for node in list(module.graph.nodes):
            if _is_checkpoint(node):
                _inline(module, node)
                found = True


def _is_checkpoint(node: fx.Node) -> bool:
    name = getattr(node.target, "name", None)
    return node.op == "call_function" and callable(name) and name() == "tag_activation_checkpoint"


def _inline(module: fx.GraphModule, node: fx.Node) -> None:
    body_node, *operands = node.args
    assert isinstance(body_node, fx.Node)
    body = module.get_submodule(str(body_node.target))
    assert isinstance(body, fx.GraphModule)
    results = _copy_body(module, node, body, operands, next(_numbers))
    for user in list(node.users):
        index: Any = user.args[1]  # the region returns a tuple
        value = results[index]
        user.replace_all_uses_with(value)
        module.graph.erase_node(user)
    module.graph.erase_node(node)
    if not body_node.users:
        module.graph.erase_node(body_node)


def _copy_body(
    module: fx.GraphModule, node: fx.Node, body: fx.GraphModule, operands: list[Any], number: int
) -> tuple[Any, ...]:
    inputs = iter(operands)
    policy = policy_of(body)
    marks = {
        REGION: number,
        **({"recompute": CheckpointPolicy.PREFER_RECOMPUTE} if policy is None else {POLICY: policy}),
    }
    env: dict[fx.Node, Any] = {}
    for old in body.graph.nodes:
        if old.op == "placeholder":
            env[old] = next(inputs)
            continue
        if old.op == "output":
            return tuple(fx.map_arg(old.args[0], lambda n: env[n]))
        with module.graph.inserting_before(node):
            new = _attribute(module, node, body, old) if old.op == "get_attr" else None
            new = new or module.graph.node_copy(old, lambda n: env[n])
        new.meta = copy.copy(old.meta)
        if "example_value" in new.meta:
            new.meta["val"] = new.meta["example_value"]
        if new.op != "get_attr":
            new.meta.update(marks)
        env[old] = new
    return ()


def _attribute(module: fx.GraphModule, node: fx.Node, body: fx.GraphModule, old: fx.Node) -> fx.Node:
    """A subgraph or constant of the region moves over under a free name."""
    target = str(old.target)
    return module.graph.get_attr(take_over(module, body, target, f"{node.name}_{target}"))
