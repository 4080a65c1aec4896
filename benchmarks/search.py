"""How long the search takes: `python benchmarks/search.py [--hostile] [--profile SHAPE NODES]`.

The graphs are built directly, with example values, module stacks and stack traces as torch.export leaves them, so that
no capture is in the time. The table shows pre-norm transformers from 1,000 to 50,000 nodes; the target is 50,000 nodes in
under 5 s on one core, and microseconds per node that don't grow. `--hostile` adds graphs whose shape is meant to hurt.
"""

from __future__ import annotations

import argparse
import cProfile
import platform
import pstats
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from resfx.patterns import Searched, search

aten = torch.ops.aten
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
TARGET_SECONDS = 5.0
B, S, D, H = 2, 16, 64, 4


class Builder:
    """A flat ATen graph under construction. Values of one shape share one fake tensor."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.root = nn.Module()
        self._mode = FakeTensorMode()
        self._values: dict[tuple[int, ...], Tensor] = {}
        self._path = ""

    def _value(self, shape: tuple[int, ...]) -> Tensor:
        if shape not in self._values:
            with self._mode:
                self._values[shape] = torch.empty(shape)
        return self._values[shape]

    def enter(self, path: str) -> None:
        """What follows belongs to the module `path`."""
        self._path = path

    def input(self, *shape: int) -> Node:
        return self._with_meta(self.graph.placeholder(f"x{len(self.graph.nodes)}"), shape)

    def weight(self, *shape: int) -> Node:
        """A new parameter, read in place as an unlifted export does."""
        name = f"w{len(self.graph.nodes)}"
        self.root.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
        return self._with_meta(self.graph.get_attr(name), shape)

    def op(self, target: Callable[..., object], *args: object, shape: tuple[int, ...] = (B, S, D)) -> Node:
        return self._with_meta(self.graph.call_function(target, args), shape)  # type: ignore[arg-type]

    def linear(self, x: Node, size: int = D, width: int = D) -> Node:
        return self.op(aten.linear.default, x, self.weight(size, width), self.weight(size), shape=(B, S, size))

    def _with_meta(self, node: Node, shape: tuple[int, ...]) -> Node:
        node.meta["val"] = self._value(shape)
        node.meta["stack_trace"] = 'File "model.py", line 7, in forward\n    x = x + self.f(x)'
        node.meta["nn_module_stack"] = {"root": ("", "Model"), self._path: (self._path, "Block")}
        return node

    def finish(self, result: Node) -> GraphModule:
        self.graph.output((result,))
        return GraphModule(self.root, self.graph)


def transformer(nodes: int) -> GraphModule:
    """A pre-norm transformer: two sites a layer."""
    build = Builder()
    x = build.input(B, S, D)
    layer = 0
    while len(build.graph.nodes) < nodes:
        build.enter(f"layers.{layer}.attention")
        x = build.op(aten.add.Tensor, x, _attention(build, x))
        build.enter(f"layers.{layer}.mlp")
        up = build.op(aten.gelu.default, build.linear(_norm(build, x), 4 * D), shape=(B, S, 4 * D))
        x = build.op(aten.add.Tensor, x, build.linear(up, D, 4 * D))
        layer += 1
    return build.finish(x)


def _norm(build: Builder, x: Node) -> Node:
    """RMSNorm, written by hand in float32."""
    wide = build.op(aten.to.dtype, x, torch.float32)
    square = build.op(aten.pow.Tensor_Scalar, wide, 2)
    mean = build.op(aten.mean.dim, square, [-1], True, shape=(B, S, 1))
    root = build.op(aten.rsqrt.default, build.op(aten.add.Tensor, mean, 1e-6, shape=(B, S, 1)), shape=(B, S, 1))
    return build.op(aten.mul.Tensor, build.op(aten.mul.Tensor, wide, root), build.weight(D))


def _attention(build: Builder, x: Node) -> Node:
    h = _norm(build, x)
    heads = []
    for _ in range(3):
        split = build.op(aten.view.default, build.linear(h), [B, S, H, D // H], shape=(B, S, H, D // H))
        heads.append(build.op(aten.transpose.int, split, 1, 2, shape=(B, H, S, D // H)))
    mixed = build.op(aten.scaled_dot_product_attention.default, *heads, shape=(B, H, S, D // H))
    joined = build.op(aten.transpose.int, mixed, 1, 2, shape=(B, S, H, D // H))
    return build.linear(build.op(aten.view.default, joined, [B, S, D]))


# -- graphs whose shape is meant to hurt


def accumulator(adds: int = 5_000) -> GraphModule:
    """`out = out + expert(x)`, again and again: adds that are no sites."""
    build = Builder()
    x = build.input(B, S, D)
    out = build.linear(x)
    for _ in range(adds):
        out = build.op(aten.add.Tensor, out, build.linear(x))
    return build.finish(out)


def dense_sums(layers: int = 100) -> GraphModule:
    """Each layer reads the sum of all values before it, added up anew: 5,000 adds."""
    build = Builder()
    values = [build.input(B, S, D)]
    for _ in range(layers):
        total = values[0]
        for value in values[1:]:
            total = build.op(aten.add.Tensor, total, value)
        values.append(build.linear(total))
    return build.finish(values[-1])


def dense_skips(layers: int = 1_000) -> GraphModule:
    """A stream with a long skip from every state to the end, added up there."""
    build = Builder()
    x = total = build.input(B, S, D)
    states = []
    for _ in range(layers):
        x = build.op(aten.add.Tensor, x, build.linear(x))
        states.append(x)
    for state in states:
        total = build.op(aten.add.Tensor, total, state)
    return build.finish(build.linear(total))


def shared_bias(layers: int = 2_000) -> GraphModule:
    """One bias, computed from the input, is added to the scores of every layer."""
    build = Builder()
    x = build.input(B, S, D)
    bias = build.linear(x, S)
    for _ in range(layers):
        scores = build.op(aten.add.Tensor, build.linear(x, S), bias, shape=(B, S, S))
        weights = build.op(aten._softmax.default, scores, -1, False, shape=(B, S, S))
        x = build.op(aten.add.Tensor, x, build.op(aten.matmul.default, weights, build.linear(x)))
    return build.finish(x)


def nested(depth: int = 300) -> GraphModule:
    """`x + f(x)` with f holding the next one: every site lies in the branches of all sites around it."""
    build = Builder()
    values = [build.input(B, S, D)]
    for _ in range(depth):
        values.append(build.linear(values[-1]))
    inner = build.linear(values[-1])
    for value in reversed(values):
        inner = build.op(aten.add.Tensor, value, build.linear(inner))
    return build.finish(inner)


def identities(length: int = 5_000) -> GraphModule:
    """A site on a state that went through a chain of views."""
    build = Builder()
    x = build.input(B, S, D)
    viewed = x
    for _ in range(length):
        viewed = build.op(aten.view.default, viewed, [B, S, D])
    return build.finish(build.op(aten.add.Tensor, viewed, build.linear(x)))


def powers(length: int = 200) -> GraphModule:
    """`p = p * p`, again and again: each factor could be the state."""
    build = Builder()
    x = power = build.linear(build.input(B, S, D))
    for _ in range(length):
        power = build.op(aten.mul.Tensor, power, power)
    return build.finish(build.op(aten.add.Tensor, power, build.linear(x)))


def activations(length: int = 5_000) -> GraphModule:
    """One operation on the stream after another, and a sum at the end."""
    build = Builder()
    x = build.input(B, S, D)
    state = build.op(aten.add.Tensor, x, build.linear(x))
    for _ in range(length):
        state = build.op(aten.sigmoid.default, build.op(aten.mul.Tensor, state, build.op(aten.tanh.default, state)))
    return build.finish(build.op(aten.add.Tensor, state, build.linear(state)))


HOSTILE: tuple[Callable[..., GraphModule], ...] = (
    accumulator, dense_sums, dense_skips, shared_bias, nested, identities, powers, activations,
)  # fmt: skip


def timed(graph_module: GraphModule) -> tuple[Searched, float]:
    """The result and the seconds of processor time that it took: other work on the machine doesn't count."""
    start = time.process_time()
    found = search(graph_module)
    return found, time.process_time() - start


def row(name: str, graph_module: GraphModule) -> tuple[str, float]:
    found, seconds = timed(graph_module)
    nodes = len(graph_module.graph.nodes)
    sites = sum(len(stream.sites) for stream in found.streams)
    text = f"{name:14} {nodes:7,} {sites:6,} {len(found.rejected):9,} {seconds:8.2f} {1e6 * seconds / nodes:9.1f}"
    return text, seconds


def rows(hostile: bool) -> Iterator[tuple[str, float]]:
    for size in SIZES:
        yield row("transformer", transformer(size))
    for shape in HOSTILE if hostile else ():
        yield row(shape.__name__, shape())


def profile(name: str, size: int) -> None:
    shapes = {shape.__name__: shape for shape in (transformer, *HOSTILE)}
    graph_module = shapes[name](size)
    profiler = cProfile.Profile()
    profiler.runcall(search, graph_module)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the search over synthetic graphs.")
    parser.add_argument("--hostile", action="store_true", help="graphs whose shape is meant to hurt, too")
    parser.add_argument("--profile", nargs=2, metavar=("SHAPE", "SIZE"), help="print where the time goes instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile:
        profile(options.profile[0], int(options.profile[1]))
        return
    machine = platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, python {platform.python_version()}, {machine}, one core")
    print(f"{'graph':14} {'nodes':>7} {'sites':>6} {'rejected':>9} {'seconds':>8} {'us/node':>9}")
    times = []
    for text, seconds in rows(options.hostile):
        print(text, flush=True)
        times.append(seconds)
    verdict = "met" if times[len(SIZES) - 1] < TARGET_SECONDS else "missed"
    print(f"target: {SIZES[-1]:,} nodes in under {TARGET_SECONDS:g} s: {verdict}")


if __name__ == "__main__":
    main()
