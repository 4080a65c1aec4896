"""What a rewrite leaves behind: names, select, refusals, provenance, several streams, in-place models, later tools."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from passes_reference import EventModel, reference
from passes_toys import Toy, capture, perturb, relative, stream_of
from test_events import FORMS as EXAMPLES
from test_events import MODELS, build, compare
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_flatten

from resfx.passes import (
    Applied,
    AttentionResidual,
    DeltaAttention,
    EditError,
    Highway,
    MultiGate,
    Plan,
    Refusal,
    Review,
    ScaledLoop,
    Standard,
    apply,
    apply_all,
)
from resfx.passes.form import Form
from resfx.patterns.streams import Reader, Stream, Write

ALL: list[Form] = [DeltaAttention(), AttentionResidual(), MultiGate(streams=2), Review(), Highway(), ScaledLoop()]


def text(form: Form) -> str:
    return form.to_spec()


def toy(layers: int = 3, **options: object) -> tuple[GraphModule, Stream, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    graph_module = capture(Toy(layers=layers, d=16, **options).double(), x)
    return graph_module, stream_of(graph_module), x


def new_names(graph_module: nn.Module) -> set[str]:
    return {name for name, _ in graph_module.named_parameters() if name.startswith("residual.")}


def test_names_shapes_and_starts() -> None:
    graph_module, stream, _ = toy()
    original = set(graph_module.state_dict())
    applied = apply(graph_module, stream, AttentionResidual(query_init_std=0.5))
    assert isinstance(applied, Applied)
    owners = ("1", "2", "final")
    assert new_names(graph_module) == {f"residual.0.{o}.{n}" for o in owners for n in ("query", "key_norm")}
    assert set(applied.parameters) == new_names(graph_module)
    assert set(graph_module.state_dict()) == original | new_names(graph_module)
    parameters = dict(graph_module.named_parameters())
    assert all(parameters[name].requires_grad and parameters[name].shape == (16,) for name in applied.parameters)
    assert torch.equal(parameters["residual.0.1.key_norm"], torch.ones(16, dtype=torch.float64))
    assert 0.2 < float(parameters["residual.0.1.query"].detach().std()) < 1.0
    assert applied.counts == {"reads": 2, "ends": 1}
    assert applied.sites == (0, 1, 2)


def test_parameters_take_the_place_of_their_branch() -> None:
    graph_module, stream, _ = toy()
    wide = {n for n, _ in graph_module.named_parameters() if n.startswith("sub.1.")}
    for name in wide:
        owner, _, leaf = name.rpartition(".")
        parameter = graph_module.get_parameter(name)
        setattr(graph_module.get_submodule(owner), leaf, nn.Parameter(parameter.detach().float(), False))
    apply(graph_module, stream, Review())
    dtypes = [graph_module.get_parameter(f"residual.0.{site}.bias").dtype for site in range(3)]
    assert dtypes == [torch.float64, torch.float32, torch.float64]


def test_tied_sites_share_their_parameters() -> None:
    graph_module, stream, _ = toy(layers=2, loops=3)
    apply(graph_module, stream, Review(tied=True))
    assert new_names(graph_module) == {f"residual.0.{b}.{n}" for b in (0, 1) for n in ("weight", "bias")}


@pytest.mark.parametrize("form", ALL, ids=text)
def test_a_perturbed_parameter_changes_the_output(form: Form) -> None:
    graph_module, stream, x = toy(layers=4)
    apply(graph_module, stream, form if not isinstance(form, ScaledLoop) else ScaledLoop(learnable=True))
    perturb(graph_module)
    before = graph_module(x)
    assert new_names(graph_module)
    for name in new_names(graph_module):
        parameter = graph_module.get_parameter(name)
        with torch.no_grad():
            parameter += torch.linspace(0.1, 0.4, parameter.numel(), dtype=parameter.dtype).reshape(parameter.shape)
        assert relative(graph_module(x), before) > 1e-7, name
        before = graph_module(x)


@pytest.mark.parametrize("form", [DeltaAttention(), AttentionResidual(), Review(), ScaledLoop()], ids=text)
def test_unselected_sites_are_plain_writes(form: Form) -> None:
    """Sites 0 and 2 stay plain, but count and are sources."""
    torch.manual_seed(0)
    model, inputs, _ = build("pre")
    graph_module = capture(model, *inputs)
    applied = apply(graph_module, stream_of(graph_module), form, select=lambda s: s.index in (1, 3, 4))
    assert applied.sites == (1, 3, 4)
    names = {name.split(".")[2] for name in new_names(graph_module)}
    assert names <= {"1", "3", "4", "final"}
    perturb(graph_module)
    expected = _partly(form, model, graph_module, inputs[0], {1, 3, 4})
    assert relative(graph_module(*inputs)[0], expected) < 1e-12


def _partly(form: Form, model: EventModel, graph_module: GraphModule, x: Tensor, chosen: set[int]) -> Tensor:
    from passes_reference import REFERENCES, Plain

    own = dict(graph_module.named_parameters())
    ref = REFERENCES[form.name](form, lambda o, n: own.get(f"residual.0.{o}.{n}"), x, list(range(5)), -1)
    plain = x
    for site in range(5):
        read = ref.read(site) if site in chosen else (plain if form.merges else ref.h)
        u = model.sub[site](read)
        if site in chosen or form.name in ("delta", "attention_residual"):
            ref.write(site, u)
        else:
            Plain.write(ref, site, u)
        plain = plain + u
    return ref.end("final")


def test_refusals_leave_the_graph_alone() -> None:
    def reason(form: Form, change: object = None, **changes: object) -> str:
        graph_module, stream, _ = toy()
        if change is not None:
            change(stream)
        stream = dataclasses.replace(stream, **changes)
        code = graph_module.code
        refused = apply(graph_module, stream, form, select=lambda s: s.index < 9)
        assert isinstance(refused, Refusal)
        assert not refused
        assert graph_module.code == code
        assert not new_names(graph_module)
        return str(refused)

    assert "stream 0 can't take delta: its feature axis can't be told" in reason(DeltaAttention(), axis=None)
    assert "a coupling" in reason(Review(), refused="a coupling")
    assert "feature axis 0 has the open size" in reason(Review(), axis=0)
    assert "has 3 sites, too few for blocks=4" in reason(DeltaAttention(granularity="block", blocks=4))
    # sqrt(2 / 21) (1 + e^3) = 6.5: seven gates don't fit, and the largest number that does is named.
    graph_module, stream, _ = toy(layers=8)
    refused = apply(graph_module, stream, MultiGate(streams=7, gate="competitive"))
    assert "the largest that fits is 6" in str(refused)

    def break_site(stream: Stream) -> None:
        stream.sites[1].refused = "it is gated"

    assert "site 1 (sub.1, no source line): it is gated; leave it out with select=" in reason(Review(), break_site)

    def empty_site(stream: Stream) -> None:
        stream.sites[0].terms = ()

    assert "no update beside the skip" in reason(Review(), empty_site)


def test_no_site_selected_is_a_refusal() -> None:
    graph_module, stream, _ = toy()
    assert "no site of it is selected" in str(apply(graph_module, stream, Review(), select=lambda s: False))


def test_scaled_loop_needs_no_axis() -> None:
    graph_module, stream, _ = toy()
    assert apply(graph_module, dataclasses.replace(stream, axis=None), ScaledLoop())


def test_integer_streams_are_refused() -> None:
    class Integers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, dtype=torch.int64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + x * self.w

    graph_module = capture(Integers(), torch.ones(3, 4, dtype=torch.int64))
    assert "dtype torch.int64" in str(apply(graph_module, stream_of(graph_module), ScaledLoop()))


def test_every_new_node_tells_where_it_comes_from() -> None:
    graph_module, stream, _ = toy()
    old = set(graph_module.graph.nodes)
    apply(graph_module, stream, Review(), warm_start=True)
    new = [node for node in graph_module.graph.nodes if node not in old]
    writes = [node for node in new if node.name.startswith("review_write")]
    assert [node.meta["custom"]["resfx"] for node in writes] == [
        {"form": "review", "stream": 0, "site": site} for site in range(3)
    ]
    assert all("val" in node.meta for node in new)
    assert all("stack_trace" in node.meta and "nn_module_stack" in node.meta for node in writes)
    shared = copy.deepcopy(graph_module)
    assert [n.meta["custom"] for n in shared.graph.nodes if n.name.startswith("review_write")] == [
        n.meta["custom"] for n in writes
    ]


def test_a_name_that_is_taken() -> None:
    graph_module, stream, _ = toy()
    graph_module.residual = nn.Linear(2, 2)
    with pytest.raises(EditError, match="has a 'residual' of its own"):
        apply(graph_module, stream, Review())


class Nested(nn.Module):
    """A residual inside the branch of a residual; the inner stream starts at the outer one's state."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.ModuleList(nn.Linear(d, d) for _ in range(3)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            y = x
            for layer in block:
                y = y + torch.tanh(layer(y))
            x = x + y
        return x


def nested_streams(graph_module: GraphModule) -> list[Stream]:
    outer = stream_of(graph_module)
    inner = []
    for number, event in enumerate(outer.events):
        assert isinstance(event, Write)
        last = event.site.terms[0].operands[0]
        stream = stream_of(graph_module, entry=event.before, last=last)
        readers = [r for r in stream.readers if r.state is not event.before or r.role == "branch"]
        readers = [r for r in readers if not _leads_past(r, last, outer)]
        inner.append(Stream(number + 1, event.before, stream.events, tuple(readers), -1))
    return [outer, *inner]


def _leads_past(reader: Reader, last: torch.fx.Node, outer: Stream) -> bool:
    return reader.state is not last and any(reader.user is event.after for event in outer.events)


@pytest.mark.parametrize("inner_form", [DeltaAttention(), AttentionResidual(), Review()], ids=text)
@pytest.mark.parametrize("outer_form", [DeltaAttention(), AttentionResidual(), MultiGate(streams=2)], ids=text)
def test_nested_streams(outer_form: Form, inner_form: Form) -> None:
    from passes_reference import REFERENCES

    torch.manual_seed(0)
    model, x = Nested().double(), torch.randn(3, 8, dtype=torch.float64)
    graph_module = capture(model, x)
    outer, *inner = nested_streams(graph_module)
    plans = [*[Plan(stream, inner_form) for stream in inner], Plan(outer, outer_form)]
    results = apply_all(graph_module, plans)
    assert [r.stream for r in results] == [1, 2, 3, 0]
    perturb(graph_module)
    own = dict(graph_module.named_parameters())

    def start(form: Form, stream: int, h0: Tensor) -> object:
        return REFERENCES[form.name](form, lambda o, n: own.get(f"residual.{stream}.{o}.{n}"), h0, [0, 1, 2], -1)

    ref = start(outer_form, 0, x)
    for number, block in enumerate(model.inner):
        inside = start(inner_form, number + 1, ref.read(number))
        for site, layer in enumerate(block):
            inside.write(site, torch.tanh(layer(inside.read(site))))
        ref.write(number, inside.end("final"))
    assert relative(graph_module(x), ref.end("final")) < 1e-12


@pytest.mark.parametrize("form", [Standard(), *ALL], ids=text)
def test_in_place_adds(form: Form) -> None:
    """`x += f(x)` changes its input: what a form keeps must not change with it."""
    torch.manual_seed(0)
    plain = EventModel(MODELS["pre"]).double()
    in_place = EventModel([("clone",), *(("site_" if kind == "site" else kind, k) for kind, k in MODELS["pre"])])
    in_place.double().load_state_dict(plain.state_dict())
    x = torch.randn(3, 4, 8, dtype=torch.float64)
    graph_module = capture(in_place, x, x, dialect="fx")
    apply(graph_module, stream_of(graph_module), form)
    perturb(graph_module)
    own = dict(graph_module.named_parameters())
    with torch.no_grad():
        expected = reference(form, plain, lambda o, n: own.get(f"residual.0.{o}.{n}"), x, x)
        assert relative(graph_module(x, x)[0], expected[0]) < 1e-12


@pytest.mark.parametrize("form", [DeltaAttention(), AttentionResidual()], ids=text)
def test_a_batch_norm_in_the_stream_runs_once(form: Form) -> None:
    """Its statistics follow one forward pass, whether its node was kept or copied."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sub = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
            self.bn = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for sub, bn in zip(self.sub, self.bn, strict=True):
                x = bn(x + sub(x))
            return x

    torch.manual_seed(0)
    model, x = Normed(), torch.randn(7, 6)
    graph_module = capture(model, x, dialect="fx")
    apply(graph_module, stream_of(graph_module), form)
    norms = [graph_module.get_submodule(f"bn.{i}") for i in range(3)]
    before = [int(norm.num_batches_tracked) for norm in norms]
    graph_module.train()(x)
    assert [int(norm.num_batches_tracked) for norm in norms] == [count + 1 for count in before]


@pytest.mark.parametrize("form", [DeltaAttention(), AttentionResidual(), MultiGate(streams=2), Review()], ids=text)
def test_the_result_exports_again(form: Form) -> None:
    graph_module, stream, x = toy()
    apply(graph_module, stream, form)
    perturb(graph_module)
    program = torch.export.export(graph_module, (x,), strict=False)
    assert relative(program.module()(x), graph_module(x)) < 1e-14
    assert not [n for n in program.graph.nodes if "autocast" in n.name]


@pytest.mark.parametrize("form", EXAMPLES, ids=text)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_example_values_are_what_runs(form: Form, dtype: torch.dtype) -> None:
    """Shapes and dtypes that the ops foretell are the ones they return."""
    torch.manual_seed(0)
    model, x = Toy(layers=4, d=16).to(dtype), torch.randn(3, 5, 16).to(dtype)
    graph_module = capture(model, x, dialect="fx")
    assert apply(graph_module, stream_of(graph_module), form)

    class Compare(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            value = super().run_node(n)
            if "resfx" in n.meta.get("custom", {}):
                (found, layout), (example, expected) = map(tree_flatten, (value, n.meta["val"]))
                assert layout == expected, n
                assert all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in zip(found, example, strict=True)), n
            return value

    Compare(graph_module).run(x)


def test_the_result_compiles_without_a_break() -> None:
    graph_module, stream, x = toy(layers=2)
    apply(graph_module, stream, DeltaAttention(null_source=True, gate="scalar"))
    perturb(graph_module)
    compiled = torch.compile(graph_module, backend="aot_eager", fullgraph=True)
    assert relative(compiled(x), graph_module(x)) < 1e-14


def test_the_graph_before_and_after() -> None:
    graph_module, stream, _ = toy(layers=2)
    assert _glue(graph_module) == ["add(x, linear_1)", "add_1(add, linear_3)"]
    apply(graph_module, stream, DeltaAttention())
    assert _glue(graph_module) == [
        "add(x, linear_1)",
        "delta_read(add, x, linear_1, residual_0_1_query, residual_0_1_key_norm)",
        "add_1(add, linear_3)",
    ]
    model, inputs, _ = build("pre")
    compare(_rewritten(model, inputs), model, Review(), inputs)


def _glue(graph_module: GraphModule) -> list[str]:
    wanted = ("add", "delta_read")
    nodes = [node for node in graph_module.graph.nodes if node.op == "call_function" and node.name.startswith(wanted)]
    return [f"{node.name}({', '.join(n.name for n in node.all_input_nodes)})" for node in nodes]


def _rewritten(model: EventModel, inputs: tuple[Tensor, Tensor]) -> GraphModule:
    graph_module = capture(model, *inputs)
    apply(graph_module, stream_of(graph_module), Review())
    return graph_module
