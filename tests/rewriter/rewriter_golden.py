"""The golden files for tests that go through `resfx.rewrite`: loading parameters by their names, and the comparison."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from resfx import Rewritten

TOLERANCE = {"float64": 1e-9, "float32": 2e-5}  # relative norms
Arrays = Mapping[str, np.ndarray]


def _load_check() -> ModuleType:
    file = Path(__file__).parents[1] / "golden" / "check.py"
    spec = importlib.util.spec_from_file_location("rewriter_golden_check", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


golden = _load_check()


def outputs_and_gradients(refs: Arrays) -> dict[str, np.ndarray]:
    """The references that every rewrite must match: all but the intermediates."""
    return {name: value for name, value in refs.items() if not name.startswith("aux/")}


def load_parameters(model: Rewritten, values: Mapping[str, Tensor], missing: set[str]) -> None:
    """Load every parameter of `model` from `values` by its name there.

    `missing`: names in `values` that the model must not have (sites that are constant in them). Errors: AssertionError.
    """
    own = {name for name, _ in model.named_parameters()}
    assert set(values) - own == missing, f"not as expected in the model: {sorted((set(values) - own) ^ missing)}"
    assert own <= set(values), f"not in the golden file: {sorted(own - set(values))}"
    kept = {name: value for name, value in values.items() if name in own}
    result = model.load_state_dict(kept, strict=False)
    assert not result.unexpected_keys
    assert not own & set(result.missing_keys)


def gradients(model: nn.Module, names: Mapping[str, str], params: Arrays) -> dict[str, Tensor]:
    """`grad/<published name>` of all of `params`, in their published shapes; zeros where the model has no such one.

    `names`: published name -> name in `model`.
    """
    own = dict(model.named_parameters())
    found: dict[str, Tensor] = {}
    for published, value in params.items():
        if names[published] not in own:
            found[f"grad/{published}"] = torch.zeros(value.shape)
            continue
        grad = own[names[published]].grad
        assert grad is not None, f"{names[published]} has no gradient"
        found[f"grad/{published}"] = grad.reshape(value.shape)
    return found


def constant_parameters(refs: Arrays) -> set[str]:
    """Residual parameters whose golden gradient is zero throughout: the sites that are constant in them."""
    zeros = {name.removeprefix("grad/") for name, value in refs.items() if name.startswith("grad/") and not value.any()}
    return {name for name in zeros if name.startswith("res.") or "_res_" in name}


def assert_golden(result: Mapping[str, Any], refs: Arrays, dtype: str) -> None:
    """Every reference is in `result`, nothing else is, and all agree. Errors: AssertionError naming the worst."""
    assert set(result) == set(refs), f"compared names differ: {sorted(set(result) ^ set(refs))}"
    errors = {name: golden.error(result[name], refs[name]) for name in refs}
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE[dtype]}
    worst = sorted(wrong, key=lambda name: -wrong[name])
    listed = ", ".join(f"{name} {wrong[name]:.1e}" for name in worst[:5])
    assert not wrong, f"{len(wrong)} of {len(errors)} differ: {listed}"
