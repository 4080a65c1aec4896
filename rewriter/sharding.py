"""`shard_units`: which modules of a rewritten model fully_shard (FSDP2) should take together."""

from __future__ import annotations

from torch import nn

from resfx.revert import NotRewritten, require_rewritten
from resfx.rewritten import is_attached


def shard_units(model: nn.Module) -> list[list[nn.Module]]:
    """The submodules that the graph of `model` calls, block by block in execution order: one unit of fully_shard each.

        for unit in resfx.shard_units(model):
            fully_shard(unit)
        fully_shard(model)   # what is left: embeddings, head, the new parameters

    A block is the module that adds a site's update; what it called is called from the graph now, so that wrapping the block itself
    would gather nothing. A module that several blocks share is in the first one's unit.
    Errors: NotRewritten; an attached model is one unit, `fully_shard(model)`: hooks within it would cut what Dynamo captures.
    """
    if is_attached(model):
        raise NotRewritten(
            f"this {type(model).__name__} is attached (resfx.attach), and can only be sharded as one unit: fully_shard(model) alone,"
            " for hooks on its parts cut what Dynamo captures. For a unit per block shard what resfx.rewrite returns"
        )
    own = require_rewritten(model, "sharded")
    blocks = list(dict.fromkeys(site.path for site in own.residual_map.sites if site.path))
    units: dict[str, list[nn.Module]] = {block: [] for block in blocks}
    taken: set[int] = set()
    for node in own.graph.nodes:
        path = str(node.target) if node.op == "call_module" else ""
        block = next((b for b in sorted(blocks, key=len, reverse=True) if path.startswith(f"{b}.")), None)
        if block is None or id(own.get_submodule(path)) in taken:
            continue
        module = own.get_submodule(path)
        taken.add(id(module))
        if any(True for _ in module.parameters()):
            units[block].append(module)
    return [unit for unit in units.values() if unit]
