"""Small models for the pass tests, their graphs in two dialects, and their streams read off the graph's spine."""

from __future__ import annotations

import copy
import operator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from resfx.patterns.streams import (
    Cast,
    Event,
    Layout,
    Reader,
    Scale,
    Side,
    Site,
    Stream,
    Term,
    Transition,
    Write,
)


class Sublayer(nn.Module):
    """The golden files' branch: Linear, GELU, Linear, and a norm that the model places."""

    def __init__(self, d: int = 32, hidden: int = 24) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def branch(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Toy(nn.Module):
    """Pre-norm, post-norm, or tied repeats of the same sublayers."""

    def __init__(self, norm: str = "pre", layers: int = 6, loops: int = 1, d: int = 32, head: bool = False) -> None:
        super().__init__()
        self.norm, self.loops = norm, loops
        self.sub = nn.ModuleList(Sublayer(d) for _ in range(layers))
        self.head = nn.LayerNorm(d) if head else None

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.loops):
            for sub in self.sub:
                x = x + sub.branch(sub.ln(x)) if self.norm == "pre" else sub.ln(x + sub.branch(x))
        return x if self.head is None else self.head(x)


def capture(model: nn.Module, *args: Tensor, dialect: str = "aten") -> GraphModule:
    """The model's graph with example values: torch.export's ATen ops (open batch size), or fx with leaf modules."""
    model = copy.deepcopy(model)
    if dialect == "fx":
        graph_module = fx.symbolic_trace(model)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        FakeTensorProp(graph_module, mode).propagate(*args)
        return graph_module
    shapes = tuple({0: torch.export.Dim.DYNAMIC} if a.dim() > 1 else None for a in args)
    graph_module = torch.export.export(model, args, strict=False, dynamic_shapes=shapes).module()
    assert isinstance(graph_module, GraphModule)
    for node in list(graph_module.graph.nodes):
        if "guards" in str(node.target) or "_assert_tensor_metadata" in str(node.target):
            graph_module.graph.erase_node(node)
    graph_module.recompile()
    return graph_module


def name_of(graph_module: GraphModule, node: Node) -> str:
    """The kind of a node, whatever its dialect."""
    if node.op == "call_module":
        return type(graph_module.get_submodule(str(node.target))).__name__.lower()
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[1].rstrip("_")
    if node.op == "call_function":
        return {"iadd": "add", "itruediv": "div", "truediv": "div"}.get(node.target.__name__, node.target.__name__)
    return str(node.target).rstrip("_")


def stream_of(
    graph_module: GraphModule, axis: int | None = -1, entry: Node | None = None, last: Node | None = None
) -> Stream:
    """The stream from `entry` (the input x) to `last` (the first output); a step's first argument is the state."""
    first = entry or next(n for n in graph_module.graph.nodes if n.op == "placeholder" and n.target == "x")
    spine = _spine(graph_module, first, last)
    events, sites = [], 0
    for before, after in pairwise(spine):
        event = _event(graph_module, before, after, sites, set(spine))
        sites += isinstance(event, Write)
        events.append(event)
    _tie([event.site for event in events if isinstance(event, Write)])
    readers = _readers(spine, events)
    return Stream(0, first, tuple(events), tuple(readers), axis, tuple(first.meta["val"].shape))


def _spine(graph_module: GraphModule, first: Node, last: Node | None) -> list[Node]:
    output = next(n for n in graph_module.graph.nodes if n.op == "output")
    node = last if last is not None else output.all_input_nodes[0]
    if str(node.target).startswith("head") or any("head" in n.name for n in node.all_input_nodes):
        node = node.all_input_nodes[0]  # the final norm reads the stream, it isn't part of it
    spine = [node]
    while node is not first:
        node = node.args[0]
        spine.append(node)
    return spine[::-1]


def _event(graph_module: GraphModule, before: Node, after: Node, index: int, spine: set[Node]) -> Event:
    kind = name_of(graph_module, after)
    if kind in ("layer_norm", "layernorm", "relu", "batch_norm", "batchnorm1d", "native_batch_norm"):
        return Transition(before, after, (after,))
    if kind in ("permute", "transpose", "view", "reshape", "flatten", "unflatten"):
        return Layout(before, after)
    if kind in ("to", "float", "double", "clone", "contiguous", "_to_copy"):
        return Cast(before, after)
    if kind in ("mul", "div"):
        return Scale(before, after, after.args[1], kind == "div")
    if kind == "slice_scatter":
        add = after.args[1]
        return Write(before, after, _site(graph_module, add, after, add.args[1], index, spine, (add.args[0],)))
    assert kind in ("add", "sub", "add_"), kind
    sign = -1.0 if kind == "sub" else 1.0
    term = after.args[1]
    if not _params(graph_module, term, spine):
        return Side(before, after, (Term("value", (term,), sign),))
    return Write(before, after, _site(graph_module, after, after, term, index, spine, (), sign))


def _site(
    graph_module: GraphModule,
    node: Node,
    result: Node,
    term: Node,
    index: int,
    spine: set[Node],
    region: tuple[Node, ...],
    scale: float = 1.0,
) -> Site:
    params = frozenset(_params(graph_module, term, spine))
    terms = (Term("value", (term,), scale),)
    return Site(
        node,
        result,
        node.args[0],
        terms,
        (term,),
        params,
        index=index,
        region=region,
        path=f"sub.{index}",
        kind="slice" if region else "plain",
    )


def _params(graph_module: GraphModule, term: Node, spine: set[Node]) -> set[str]:
    names: set[str] = set()
    waiting, seen = [term], set()
    own = dict(graph_module.named_parameters(remove_duplicate=False))
    while waiting:
        node = waiting.pop()
        if node in seen or node in spine:
            continue
        seen.add(node)
        target = str(node.target)
        names.update(n for n in own if n == target or (node.op == "call_module" and n.startswith(f"{target}.")))
        waiting.extend(node.all_input_nodes)
    return names


def _tie(sites: list[Site]) -> None:
    branches: dict[frozenset[str], int] = {}
    for site in sites:
        site.branch_id = branches.setdefault(site.params, len(branches))
    for site in sites:
        site.repeats = sum(other.branch_id == site.branch_id for other in sites)


def _readers(spine: list[Node], events: list[Any]) -> list[Reader]:
    """Who reads a state: the branch of the next site if that site's update depends on the user, else a tap."""
    readers = []
    for position, state in enumerate(spine):
        following = [event for event in events[position:] if isinstance(event, Write)]
        for user in state.users:
            if position < len(events) and (user is events[position].after or user.meta.get("skip")):
                continue
            if name_is_size(user):
                readers.append(Reader(user, state, "shape"))
                continue
            site = next((w.site for w in following if _depends(w.site.branches[0], user)), None)
            if site is not None:
                readers.append(Reader(user, state, "branch", site.index))
            elif not (following and user in following[0].site.region):
                readers.append(Reader(user, state, "tap"))
    return readers


def name_is_size(node: Node) -> bool:
    return "sym_size" in node.name or node.target in ("size", getattr)


def _depends(node: Node, ancestor: Node) -> bool:
    waiting, seen = [node], set()
    while waiting:
        current = waiting.pop()
        if current is ancestor:
            return True
        if current not in seen:
            seen.add(current)
            waiting.extend(current.all_input_nodes)
    return False


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||."""
    difference, size = float((a - b).detach().norm()), float(b.detach().norm())
    return difference / size if size > 1e-12 else difference


def perturb(graph_module: GraphModule, seed: int = 0, size: float = 0.3) -> None:
    """Move every new parameter away from its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in graph_module.named_parameters():
            if name.startswith("residual."):
                p += size * torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)


__all__ = ["Sublayer", "Toy", "capture", "name_of", "operator", "perturb", "relative", "stream_of"]
