"""Inductor's caches on disk: what they must know of the functions that a form emits."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import fx

import resfx.passes
from resfx.passes import Form


@contextmanager
def cacheable(graph: fx.Graph, forms: set[Form]) -> Iterator[None]:
    """Within, Inductor may cache what it compiles of `graph`, under a key that holds form, options and source.

    By itself it takes a graph with a function it does not know out of AOTAutograd's cache. Ours depend on their arguments alone.
    """
    config = getattr(sys.modules.get("torch._inductor"), "config", None)
    if config is None:  # another backend: there is nothing to tell
        yield
        return
    key = f"{_source()}, {sorted(form.to_spec() for form in forms)}"
    marked = {**config.unsafe_marked_cacheable_functions, **dict.fromkeys(_own_functions(graph), key)}
    with config.patch(unsafe_marked_cacheable_functions=marked):
        yield


def _own_functions(graph: fx.Graph) -> set[str]:
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    own = [target for target in targets if str(getattr(target, "__module__", "")).startswith("resfx.passes")]
    return {f"{target.__module__}.{target.__name__}" for target in own}


@functools.cache
def _source() -> str:
    """A hash of the passes' source: a function that was changed is another one."""
    total = hashlib.sha256()
    for path in sorted(Path(resfx.passes.__path__[0]).glob("*.py")):
        total.update(path.read_bytes())
    return total.hexdigest()
