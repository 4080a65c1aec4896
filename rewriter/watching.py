"""Runs a marked graph node by node and reads what is going on at every site. See `resfx.passes.marks`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from resfx.graphed import GraphedModule
from resfx.passes import ops
from resfx.passes.marks import Mark, marks_of, note_of
from resfx.passes.probes import Probe, probe

# Stream, site ("final" and "tap<k>" for what leaves the stream), and which calls of the repeated bodies around it.
Key: TypeAlias = tuple[int, int | str, tuple[int, ...]]
_WARM = ".warm"  # a blend by this parameter is the warm start's, not a gate of the form


@dataclass
class Row:
    """What was seen at one execution of one site. The numbers are tensors of no dimension."""

    state: Tensor | None = None
    read: Tensor | None = None
    update: Tensor | None = None
    cosine: Tensor | None = None
    weight_max: Tensor | None = None
    weight_entropy: Tensor | None = None
    sources: int = 0
    gate: Tensor | None = None
    traced: tuple[Tensor, float] | None = None  # a value that u is `scale` times, for the gradient of u
    shape: torch.Size | None = None  # of the state
    parts: dict[tuple[int, int], Any] = field(default_factory=dict)


class Recorder:
    """Collects rows in the order of execution."""

    def __init__(self) -> None:
        self.rows: dict[Key, Row] = {}
        self.calls: tuple[int, ...] = ()
        self._last: dict[int, Tensor] = {}  # the latest update of every stream

    def row(self, stream: int, site: int | str) -> Row:
        return self.rows.setdefault((stream, site, self.calls), Row())

    def see(self, node: fx.Node, value: Any) -> Any:
        """Take notice of the value of `node`; what the graph goes on with."""
        for mark in marks_of(node):
            row = self.row(mark["stream"], mark["site"])
            if mark["role"] in ("update", "scale"):
                value = self._see_part(row, mark, value)
            elif isinstance(value, Tensor):
                setattr(row, mark["role"], _norm(_wide(value), mark["size"]))
                row.shape = value.shape
        return value

    def _see_part(self, row: Row, mark: Mark, value: Any) -> Any:
        if mark["role"] == "update" and isinstance(value, Tensor):
            value = _traced(row, mark, value)
        row.parts[mark["term"], mark.get("operand", -1)] = (
            value.detach() if isinstance(value, Tensor) else value,
            mark,
        )
        if len(row.parts) == mark["terms"]:
            self._see_update(row, mark)
        return value

    def _see_update(self, row: Row, mark: Mark) -> None:
        with torch.no_grad():
            update = _update(row.parts)
            if row.shape is not None and not mark["slice"]:
                update = update.expand(row.shape)
            row.update = _norm(update, mark["size"])
            before = self._last.get(mark["stream"])
            if before is not None and before.shape == update.shape:
                row.cosine = (before * update).sum() / (before.norm() * update.norm())
            self._last[mark["stream"]] = update.clone()
        row.parts = {}

    def decide(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take notice of the routing weights and gates of a call that a rewrite put there."""
        note = note_of(node)
        found = None if not note or _is_warm_start(node) else probe(node.target, args, kwargs)
        if not note or found is None:
            return
        row = self.row(note["stream"], note["site"])
        if found.weights:
            _see_weights(row, found)
        if found.gates:
            row.gate = torch.stack([gate.mean() for gate in found.gates]).mean()


def _see_weights(row: Row, found: Probe) -> None:
    weights = torch.stack(found.weights)
    row.weight_max = weights.amax(0).mean()
    row.weight_entropy = torch.special.entr(weights).sum(0).mean()
    row.sources = len(found.weights)


def _is_warm_start(node: fx.Node) -> bool:
    return any(source.op == "get_attr" and str(source.target).endswith(_WARM) for source in node.all_input_nodes)


def _wide(value: Tensor) -> Tensor:
    value = value.detach()
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _norm(value: Tensor, size: int | None) -> Tensor:
    """Root mean square, over all tokens, of a token's norm; with an unknown feature axis all of an example is one token."""
    tokens = value.numel() / size if size is not None else value.shape[0] if value.dim() > 1 else 1
    norm: Tensor = value.norm() / max(tokens, 1) ** 0.5
    return norm


def _traced(row: Row, mark: Mark, value: Tensor) -> Tensor:
    """`value`, such that a gradient reaches it; remembered where the update is a multiple of it."""
    scale, whole = mark["scale"], mark["slice"] or row.shape in (None, value.shape)
    if not (torch.is_grad_enabled() and value.is_floating_point() and mark["op"] == "value" and scale and whole):
        return value
    if row.traced is not None:
        return value
    leaf: Tensor = value if value.requires_grad else value.detach().requires_grad_()
    row.traced = (leaf, scale)
    return value if leaf is value else leaf.clone()  # a leaf could not be changed in place


def _update(parts: dict[tuple[int, int], Any]) -> Tensor:
    """u = sum of scale * op(*operands)."""
    terms = []
    for number in sorted({term for term, _ in parts}):
        operands = [parts[key] for key in sorted(parts) if key[0] == number and key[1] >= 0]
        mark, values = operands[0][1], [_wide(value) for value, _ in operands]
        value = values[0] if mark["op"] == "value" else ops.product(mark["op"], *values)
        scale = mark["scale"] if mark["scale"] is not None else parts[number, -1][0]
        terms.append(value * scale)
    return ops.add(terms)


class _Watching(fx.Interpreter):
    def __init__(self, module: nn.Module, graph: fx.Graph, recorder: Recorder) -> None:
        super().__init__(module, graph=graph)
        self.recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            self.recorder.decide(n, *self.fetch_args_kwargs_from_env(n))
        return self.recorder.see(n, super().run_node(n))


@contextlib.contextmanager
def watched(root: GraphedModule, recorder: Recorder) -> Iterator[None]:
    """While this is active a call of `root`, by whomever, is run node by node, repeated bodies included."""
    bodies = [module for module in root.modules() if isinstance(module, fx.GraphModule) and _is_marked(module.graph)]
    runs: dict[nn.Module, Callable[..., Any]] = {body: _body_run(body, recorder) for body in bodies}
    runs[root] = _root_run(root, recorder)
    for module, run in runs.items():
        module.__dict__["forward"] = run
    try:
        yield
    finally:
        for module in runs:
            del module.__dict__["forward"]


def _is_marked(graph: fx.Graph) -> bool:
    return any(marks_of(node) for node in graph.nodes)


def _root_run(root: GraphedModule, recorder: Recorder) -> Callable[..., Any]:
    signature: Any = root.graph._codegen.signature  # type: ignore[attr-defined]  # the user's own call signature

    def forward(*args: Any, **kwargs: Any) -> Any:
        flat = signature.inputs(signature.bind(args, kwargs))
        outputs = _Watching(root, root.graph, recorder).run(*flat, enable_io_processing=False)
        return signature.output(outputs)

    return forward


def _body_run(body: fx.GraphModule, recorder: Recorder) -> Callable[..., Any]:
    calls = 0

    def forward(*args: Any) -> Any:
        nonlocal calls
        outside, recorder.calls = recorder.calls, (*recorder.calls, calls)
        calls += 1
        try:
            return _Watching(body, body.graph, recorder).run(*args)
        finally:
            recorder.calls = outside

    return forward
