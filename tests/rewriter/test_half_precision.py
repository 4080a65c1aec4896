"""Models in bfloat16 and float16, and autocast: what every module receives keeps its dtype, and no accuracy is lost."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import resfx
from resfx.passes import ops
from resfx.passes.probes import PROBES

D = 32
FORMS = [
    resfx.DeltaAttention(),
    resfx.AttentionResidual(granularity="block", block_size=2),
    resfx.MultiGate(streams=2),
    resfx.Review(),
    resfx.Highway(convex=True),
    resfx.ScaledLoop(learnable=True),
]
CASTS = ["bfloat16", "float16", "autocast"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, 48), nn.Linear(48, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


@functools.cache
def plain() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(16, 8, D)


@functools.cache
def rewritten(form: resfx.Form, warm: bool, dtype: torch.dtype) -> resfx.Rewritten:
    """The model in `dtype` before the rewrite, as a user has it."""
    net, x = plain()
    return resfx.rewrite(copy.deepcopy(net).to(dtype), form, (x.to(dtype),), warm_start=warm)


def pair(form: resfx.Form, warm: bool, cast: str, size: float) -> tuple[nn.Module, nn.Module]:
    """The rewritten model in float32 and under the cast, with the same new parameters, moved by `size`."""
    dtype = getattr(torch, cast, torch.float32) if cast != "autocast" else torch.float32
    wide, half = copy.deepcopy(rewritten(form, warm, torch.float32)), copy.deepcopy(rewritten(form, warm, dtype))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            if name.startswith("residual."):
                parameter += size * torch.randn(parameter.shape, generator=generator)
    half.load_state_dict(wide.state_dict())
    return wide, half


def run(model: nn.Module, cast: str) -> Tensor:
    _, x = plain()
    mode: Any = torch.autocast("cpu", dtype=torch.bfloat16) if cast == "autocast" else contextlib.nullcontext()
    with torch.no_grad(), mode:
        return model(x if cast in ("autocast", "float32") else x.to(getattr(torch, cast)))


def cast_plain(cast: str) -> nn.Module:
    net = copy.deepcopy(plain()[0])
    return net if cast == "autocast" else net.to(getattr(torch, cast))


def dtypes(model: nn.Module, cast: str) -> dict[str, list[torch.dtype]]:
    """What every module of the user's receives and returns, and the model's output."""
    seen: dict[str, list[torch.dtype]] = {}

    def watch(name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.setdefault(name, []).extend([*(i.dtype for i in inputs), output.dtype])

        return hook

    names = [name for name, module in plain()[0].named_modules() if not list(module.children())]
    hooks = [model.get_submodule(name).register_forward_hook(watch(name)) for name in names]
    seen["output"] = [run(model, cast).dtype]
    for handle in hooks:
        handle.remove()
    assert len(seen) == len(names) + 1
    return seen


def deviation(value: Tensor, exact: Tensor) -> float:
    assert torch.isfinite(value).all()
    return float((value.double() - exact.double()).norm() / exact.double().norm())


def cases() -> list[Any]:
    """Every form under every cast; in the default run float16 for one form in three."""
    return [
        pytest.param(
            form, cast, id=f"{form.to_spec()}-{cast}", marks=[pytest.mark.slow] if cast == "float16" and i % 3 else []
        )
        for i, form in enumerate(FORMS)
        for cast in CASTS
    ]


@pytest.mark.parametrize(("form", "cast"), cases())
def test_no_module_receives_another_dtype(form: resfx.Form, cast: str) -> None:
    _, half = pair(form, True, cast, 0.1)
    expected = dtypes(cast_plain(cast), cast)
    assert dtypes(half, cast) == expected
    stored = torch.float32 if cast == "autocast" else getattr(torch, cast)
    assert {p.dtype for p in half.parameters()} == {stored}


@pytest.mark.parametrize(("form", "cast"), cases())
def test_the_deviation_is_the_plain_models(form: resfx.Form, cast: str) -> None:
    """At a warm start both compute the same function, so the same cast may cost no more: 2 % is for other roundings."""
    wide, half = pair(form, True, cast, 0.0)
    own = deviation(run(half, cast), run(wide, "float32"))
    assert deviation(run(wide, "float32"), run(plain()[0], "float32")) < 1e-6
    assert own <= 1.02 * deviation(run(cast_plain(cast), cast), run(plain()[0], "float32"))
    assert own > 0


@pytest.mark.parametrize(("form", "cast"), cases())
def test_the_deviation_away_from_the_start(form: resfx.Form, cast: str) -> None:
    """Another function, so another error, of the same size."""
    wide, half = pair(form, True, cast, 0.1)
    own = deviation(run(half, cast), run(wide, "float32"))
    assert own <= 1.5 * deviation(run(cast_plain(cast), cast), run(plain()[0], "float32"))


def test_gradients_have_the_parameters_dtype() -> None:
    _, half = pair(resfx.Review(), True, "bfloat16", 0.1)
    half(plain()[1].bfloat16()).float().square().mean().backward()
    for name, parameter in half.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.bfloat16
        assert torch.isfinite(parameter.grad).all()


def decisions() -> dict[str, tuple[Any, ...]]:
    """Arguments of every function that routes or gates, in float32; softmax and gates are far from their middle."""
    g = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    sources = [3 * r(6, D) for _ in range(4)]
    return {
        "delta_read": (r(6, D), sources, r(D), 1 + 0.1 * r(D), 1e-6, -1),
        "grouped_delta_read": (r(6, D), sources, r(D), 1 + 0.1 * r(D), 1e-6, -1, [], 0),
        "routed_read": (sources, r(D), 1 + 0.1 * r(D), 1e-6, -1),
        "grouped_routed_read": (sources, r(D), 1 + 0.1 * r(D), 1e-6, -1, None, [], 0),
        "pool": (sources, 4 * r(D), 1e-6, -1),
        "independent_mix": (sources, r(6, D), 4 * r(D), r(4), 1e-6, -1),
        "competitive_mix": (sources, r(6, D), 4 * r(D), r(1), 1e-6, -1),
        "review_write": (r(6, D), r(6, D), r(D, 2 * D), r(D), 1e-5, -1),
        "highway_write": (r(6, D), r(6, D), r(D, D), r(D), -1),
        "convex_highway_write": (r(6, D), r(6, D), r(D, D), r(D), -1),
        "vector_gate": (r(6, D), r(6, D), r(D, D), r(D), -1),
        "scalar_gate": (r(6, D), r(6, D), r(1)[0]),
        "blend": (r(6, D), r(6, D), r(1)[0]),
    }


def test_the_list_of_decisions_is_whole() -> None:
    assert set(decisions()) == {function.__name__ for function in PROBES}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", decisions())
def test_nothing_but_the_result_is_rounded(name: str, dtype: torch.dtype) -> None:
    """The half-precision result is as good as the exact one, rounded once: statistics, softmax and gates were computed wide."""
    half = tree_map_only(Tensor, lambda t: t.to(dtype), decisions()[name])
    function = getattr(ops, name)
    exact = function(*tree_map_only(Tensor, lambda t: t.double(), half))
    result = function(*half)
    for got, want in zip(*((v if isinstance(v, list) else [v]) for v in (result, exact)), strict=True):
        assert got.dtype == dtype
        assert deviation(got, want) <= 1.02 * deviation(want.to(dtype), want)
