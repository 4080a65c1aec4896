"""A sum is the same site in every order and bracketing of its terms; dominators agree with their definition."""

from __future__ import annotations

import operator
import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, Node

from resfx.patterns import Site, search
from resfx.patterns.dominators import immediate_dominators

WIDTH = 4
ADDS = [operator.add, operator.iadd, torch.add, torch.ops.aten.add.Tensor, "add", "add_"]


def mapped(graph: Graph, x: Node) -> Node:
    return graph.call_function(torch.relu, (graph.call_function(torch.matmul, (x, graph.get_attr("weight"))),))


def one_site(order: list[int], rng: random.Random) -> list[Site]:
    """The sites of `x + f(x) + g(x) + side`, terms in this order, brackets and spellings by chance, and of one more update.

    A side add after the last branch is an event of its own; anywhere else it is a term of the site.
    """
    graph = Graph()
    x, side = graph.placeholder("x"), graph.placeholder("side")
    terms = [x, mapped(graph, x), mapped(graph, x), mapped(graph, side)]
    values = [terms[i] for i in order]
    while len(values) > 1:
        i = rng.randrange(len(values) - 1)
        left, right = values[i], values[i + 1]
        spelling = rng.choice(ADDS)
        call = graph.call_method if isinstance(spelling, str) else graph.call_function
        values[i : i + 2] = [call(spelling, (left, right))]  # type: ignore[arg-type]
    state = values[0]
    graph.output(graph.call_function(torch.add, (state, mapped(graph, state))))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(WIDTH, WIDTH, device="meta")
    root = nn.Module()
    root.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
    streams = search(GraphModule(root, graph)).streams
    assert len(streams) == 1
    return streams[0].sites


@settings(max_examples=150, deadline=None)
@given(st.permutations(range(4)), st.integers(0, 10**6))
def test_every_order_and_bracketing_is_one_site(order: list[int], seed: int) -> None:
    first, second = one_site(list(order), random.Random(seed))
    assert first.skip.name == "x"
    assert {branch.name for branch in first.branches} == {"relu", "relu_1"}
    assert {term.operands[0].name for term in first.terms} - {"relu_2"} == {"relu", "relu_1"}
    assert second.index == 1
    assert [site.kind for site in (first, second)] == ["plain", "plain"]


def random_graph(seed: int, size: int = 25) -> Graph:
    rng = random.Random(seed)
    graph = Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for _ in range(size):
        operands = [rng.choice(values[-rng.choice([2, 5, 30]) :]) for _ in range(rng.choice([1, 2, 2, 3]))]
        values.append(graph.call_function(torch.stack, (operands,)))
    graph.output(values[-1])
    return graph


def ancestors_without(node: Node, cut: Node) -> set[Node]:
    """The inputs of the graph that `node` reaches on ways past `cut`."""
    seen, todo = {cut}, [node]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo.extend(current.all_input_nodes)
    return {n for n in seen if n.op == "placeholder" and n is not cut}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_dominators(seed: int) -> None:
    graph = random_graph(seed)
    found = immediate_dominators(graph, set())
    nodes = list(graph.nodes)
    for position, node in enumerate(nodes):
        cuts = [cut for cut in nodes[:position] if not ancestors_without(node, cut)]
        assert found[node] is (cuts[-1] if cuts else None)
