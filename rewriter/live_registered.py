"""The Dynamo backend "resfx", for those who call torch.compile themselves.

    resfx.attach(model, form, args)
    step = torch.compile(train_step, backend="resfx")

An attached model compiles itself wherever it is called, and with the backend that `attach` was given. This backend compiles what
is around it; where it meets a residual stream that no attached model owns, it says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from resfx.live_forward import inner_backend
from resfx.live_graph import LiveGraph
from resfx.patterns import search


def resfx_backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile a graph that holds no attached model. `options={"backend": NAME}`: with another compiler than Inductor."""
    graph = LiveGraph(graph_module, example_inputs, nn.Module())
    graph.prepare()
    plain = search(graph.module).streams
    if plain:
        site = plain[0].sites[0]
        warnings.warn(
            f"backend='resfx' met a residual stream that stays plain ({len(plain[0].sites)} sites from {site.source}):"
            " resfx.attach(model, form, args) says which form its model takes",
            stacklevel=2,
        )
    inner = inner_backend((options or {}).get("backend", "inductor"))
    compiled: Callable[..., Any] = inner(graph_module, list(example_inputs))
    return compiled


def register() -> None:
    """Make the name known to torch.compile, also where resfx runs from a checkout without its entry point."""
    from torch._dynamo import list_backends, register_backend

    if "resfx" not in list_backends(exclude_tags=()):
        register_backend(resfx_backend, name="resfx")
