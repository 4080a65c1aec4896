"""The toy models through `resfx.rewrite` into every form: outputs and all gradients against the golden files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriter_golden import (
    assert_golden,
    constant_parameters,
    golden,
    gradients,
    load_parameters,
    outputs_and_gradients,
)
from torch import Tensor, nn

import resfx
from resfx.passes import ops

CASES = golden.cases("toy_*")
D = 32


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(D)
        self.fc1, self.fc2 = nn.Linear(D, 24), nn.Linear(24, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class NormedSublayer(Sublayer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.ln(x))


class PreNorm(nn.Module):
    """`loops` > 1: the same sublayers again and again."""

    def __init__(self, layers: int, loops: int) -> None:
        super().__init__()
        self.loops = loops
        self.sub = nn.ModuleList(NormedSublayer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.loops):
            for sub in self.sub:
                x = x + sub(x)
        return x


class PostNorm(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.sub = nn.ModuleList(Sublayer() for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for sub in self.sub:
            x = sub.ln(x + sub(x))
        return x


FORMS: dict[str, Callable[[dict[str, Any]], resfx.Form]] = {
    "standard": lambda meta: resfx.Standard(),
    "scaled": lambda meta: resfx.ScaledLoop(lam=meta["lam"]),
    "review": lambda meta: resfx.Review(),
    "highway": lambda meta: resfx.Highway(),
    "delta": lambda meta: resfx.DeltaAttention(seeded=meta.get("seeded", False)),
    "delta_block": lambda meta: resfx.DeltaAttention(
        granularity="block",
        block_size=meta["block"],
        official_sources=meta["rule"] == "official",
        seeded=meta["rule"] == "paper",
    ),
    "attnres_full": lambda meta: resfx.AttentionResidual(),
    "mgr": lambda meta: resfx.MultiGate(streams=meta["streams"], gate=meta["gate"]),
}


def form_of(case: str) -> resfx.Form:
    meta = golden.meta(case)
    return FORMS[meta["form"]](meta)


def ours(name: str) -> str:
    """The golden files' parameter name as resfx names it."""
    if not name.startswith("res."):
        return name
    return "residual.0." + name.removeprefix("res.").replace("gate.weight", "weight").replace("gate.bias", "bias")


def rewritten(case: str, form: resfx.Form | None = None, **options: Any) -> resfx.Rewritten:
    """The case's model in the case's form, captured on a batch of another size than the golden one."""
    meta = golden.meta(case)
    layers, loops = meta["layers"], meta.get("loops", 1)
    model = PreNorm(layers, loops) if meta["norm"] == "pre" else PostNorm(layers)
    example = torch.randn(2, 7, D, dtype=torch.float64)
    return resfx.rewrite(model.double(), form or form_of(case), (example,), **options)


def loaded(case: str, **options: Any) -> resfx.Rewritten:
    params, _, refs = golden.load(case)
    model = rewritten(case, **options)
    absent = {ours(name) for name in constant_parameters(refs)}
    load_parameters(model, {ours(name): torch.tensor(value) for name, value in params.items()}, absent)
    return model


def run(model: resfx.Rewritten, case: str) -> dict[str, Any]:
    """Output and gradients under the golden files' names."""
    params, inputs, _ = golden.load(case)
    x = torch.tensor(inputs["x"], requires_grad=True)
    y = model(x)
    (torch.tensor(inputs["cotangent"]) * y).sum().backward()
    return {"y": y, "grad_in/x": x.grad, **gradients(model, {name: ours(name) for name in params}, params)}


def compare(model: resfx.Rewritten, case: str) -> None:
    refs = golden.load(case)[2]
    assert_golden(run(model, case), outputs_and_gradients(refs), golden.meta(case)["dtype"])


def branch_inputs(model: resfx.Rewritten) -> dict[str, Tensor]:
    """What every branch receives in the next call, by execution: seen by the user's own modules."""
    seen: dict[str, Tensor] = {}
    for sub in model.sub:
        sub.register_forward_pre_hook(lambda _, args: seen.update({f"aux/h/{len(seen)}": args[0]}))
    return seen


@pytest.mark.parametrize("frontend", ["export", "fx"])
@pytest.mark.parametrize("case", CASES)
def test_golden(case: str, frontend: str) -> None:
    model = loaded(case, frontend=frontend)
    reads = branch_inputs(model)
    compare(model, case)
    expected = {name: value for name, value in golden.load(case)[2].items() if name.startswith("aux/h/")}
    assert_golden(reads, expected, golden.meta(case)["dtype"])


def test_the_paper_s_initial_gates_are_those_of_a_fresh_rewrite() -> None:
    case = "toy_pre_mgr_independent_init"
    params = golden.load(case)[0]
    own = dict(rewritten(case, frontend="fx").named_parameters())
    biases = [name for name in params if name.endswith("b_beta") and ours(name) in own]
    assert len(biases) == golden.meta(case)["layers"] - golden.meta(case)["streams"] + 1
    for name in biases:
        assert golden.error(own[ours(name)], params[name]) <= 1e-12


# The comparison sees what is wrong (the fx frontend: the same passes, a quicker capture).


def test_a_query_off_by_a_millionth_is_seen() -> None:
    model = loaded("toy_pre_delta", frontend="fx")
    with torch.no_grad():
        model.get_parameter("residual.0.3.query")[5] += 1e-6
    with pytest.raises(AssertionError, match=r"differ: .*grad/"):
        compare(model, "toy_pre_delta")


@pytest.mark.parametrize("case", ["toy_pre_delta", "toy_post_delta", "toy_loop_delta"])
def test_a_dropped_source_is_seen(case: str) -> None:
    model = loaded(case, frontend="fx")
    read = [node for node in model.graph.nodes if node.target is ops.delta_read][-1]
    h, sources, *others = read.args
    read.args = (h, sources[:-1], *others)
    model.recompile()
    with pytest.raises(AssertionError, match="differ"):
        compare(model, case)


def test_a_gradient_that_stops_is_seen_where_the_output_is_right() -> None:
    model = loaded("toy_pre_delta", frontend="fx")
    read = next(node for node in model.graph.nodes if node.target is ops.delta_read)
    with model.graph.inserting_before(read):
        stopped = model.graph.call_function(torch.detach, (read.args[1][1],))
    read.update_arg(1, [read.args[1][0], stopped])
    model.recompile()
    with pytest.raises(AssertionError, match="differ") as caught:
        compare(model, "toy_pre_delta")
    assert "y " not in str(caught.value)


@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("toy_pre_standard", resfx.ScaledLoop()),
        ("toy_loop_scaled_lam1", resfx.ScaledLoop(lam=1.001)),
        ("toy_loop_standard", resfx.ScaledLoop()),
    ],
)
def test_another_form_is_seen(case: str, form: resfx.Form) -> None:
    with pytest.raises(AssertionError, match="differ"):
        compare(loaded(case, form=form, frontend="fx"), case)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (resfx.DeltaAttention(seeded=True, null_source=True), r"not as expected in the model: .*residual\.0\.0\.query"),
        (resfx.DeltaAttention(null_source=True), r"not in the golden file: .*residual\.0\.1\.null"),
    ],
)
def test_a_wrong_set_of_parameters_is_seen(form: resfx.Form, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        loaded("toy_pre_delta", form=form, frontend="fx")


def test_a_tensor_left_out_is_seen() -> None:
    case = "toy_pre_delta"
    refs = outputs_and_gradients(golden.load(case)[2])
    result = run(loaded(case, frontend="fx"), case)
    for name in refs:
        with pytest.raises(AssertionError, match=f"names differ: .*{name}"):
            assert_golden({key: value for key, value in result.items() if key != name}, refs, "float64")
