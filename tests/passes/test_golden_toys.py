"""Every form on the toy models against the golden numbers: outputs and all gradients, float64 to 1e-9."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from passes_toys import Toy, capture, stream_of

from resfx.passes import AttentionResidual, DeltaAttention, Highway, MultiGate, Review, ScaledLoop, Standard, apply
from resfx.passes.form import Form

_FILE = Path(__file__).parents[1] / "golden" / "check.py"
_SPEC = importlib.util.spec_from_file_location("golden_check", _FILE)
golden = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(golden)

FORMS: dict[str, Form] = {
    "toy_pre_standard": Standard(),
    "toy_pre_scaled": ScaledLoop(),
    "toy_pre_delta": DeltaAttention(),
    "toy_pre_delta_seeded": DeltaAttention(seeded=True),
    "toy_pre_delta_block_blockend": DeltaAttention(granularity="block", block_size=2, seeded=True),
    "toy_pre_delta_block_official": DeltaAttention(granularity="block", block_size=2, official_sources=True),
    "toy_pre_attnres_full": AttentionResidual(),
    "toy_pre_mgr_independent": MultiGate(streams=3),
    "toy_pre_mgr_independent_init": MultiGate(streams=3),
    "toy_pre_review": Review(),
    "toy_pre_highway": Highway(),
    "toy_post_standard": Standard(),
    "toy_post_delta": DeltaAttention(),
    "toy_loop_standard": Standard(),
    "toy_loop_scaled_lam1": ScaledLoop(lam=1.0),
    "toy_loop_delta": DeltaAttention(),
}


def ours(name: str) -> str:
    """The golden files' parameter name as resfx names it."""
    if not name.startswith("res."):
        return name
    return "residual.0." + name.removeprefix("res.").replace("gate.weight", "weight").replace("gate.bias", "bias")


def run(case: str, params: dict[str, Any], inputs: dict[str, Any], dialect: str) -> dict[str, Any]:
    meta = golden.meta(case)
    x = torch.tensor(inputs["x"], requires_grad=True)
    model = Toy(meta["norm"], meta["layers"], meta.get("loops", 1)).double()
    graph_module = capture(model, x.detach(), dialect=dialect)
    assert apply(graph_module, stream_of(graph_module), FORMS[case])
    own = dict(graph_module.named_parameters())
    with torch.no_grad():
        for name, value in params.items():
            if ours(name) in own:
                own[ours(name)].copy_(torch.tensor(value))
    missing = {name for name in own if name not in {ours(n) for n in params}}
    assert not missing, f"not in the golden file: {missing}"
    y = graph_module(x)
    (torch.tensor(inputs["cotangent"]) * y).sum().backward()
    result = {"y": y, "grad_in/x": x.grad}
    for name, value in params.items():
        # Parameters that a site is constant in don't exist here; their golden gradient is zero.
        grad = own[ours(name)].grad if ours(name) in own else torch.zeros(value.shape)
        result[f"grad/{name}"] = grad
    return result


@pytest.mark.parametrize("dialect", ["aten", "fx"])
@pytest.mark.parametrize("case", FORMS)
def test_golden(case: str, dialect: str) -> None:
    params, inputs, refs = golden.load(case)
    result = run(case, params, inputs, dialect)
    expected = {name for name in refs if not name.startswith("aux/")}
    assert expected == set(result)
    errors = {name: golden.error(result[name], refs[name]) for name in expected}
    worst = max(errors, key=errors.get)
    assert errors[worst] <= 1e-9, f"{worst}: {errors[worst]:.1e}"


def test_every_toy_file_is_covered() -> None:
    assert set(golden.cases("toy_*")) == set(FORMS)


def test_the_official_gate_bias_start() -> None:
    """The golden `init` case holds the paper's initial gates: a fresh rewrite has the same ones."""
    params, inputs, _ = golden.load("toy_pre_mgr_independent_init")
    graph_module = capture(Toy().double(), torch.tensor(inputs["x"]))
    apply(graph_module, stream_of(graph_module), MultiGate(streams=3))
    own = dict(graph_module.named_parameters())
    for name in [n for n in params if n.endswith("b_beta")]:
        assert golden.error(own[ours(name)], params[name]) <= 1e-12
