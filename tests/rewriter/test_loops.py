"""Loops from end to end: N and L found on tied stacks, `ScaledLoop(loops=K)`, `set_loops`, and what runs the result."""

from __future__ import annotations

import copy
import functools
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_models import LAM, D, Sublayer, example, made
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import resfx

# Repeats.


class Conditioned(nn.Module):
    """Pre-norm blocks with a mask, a condition that is added, a root parameter, a value from the middle, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(D, D), nn.Linear(D, D)
        self.sub = nn.ModuleList(Sublayer() for _ in range(3))
        self.gain = nn.Parameter(torch.rand(D))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor, c: Tensor) -> dict[str, Any]:
        keep = (mask > 0).unsqueeze(-1)
        x, hidden = self.embed(x), []
        for sub in self.sub:
            x = x + self.drop(sub(x * keep)) * self.gain
            hidden.append(x)
            x = x + c
        return {"out": self.head(x), "hidden": hidden}


def call() -> tuple[Tensor, Tensor, Tensor]:
    x = example()
    return x, torch.tensor([[1, 1, 1, 0, 1], [1, 0, 1, 1, 1]]), torch.randn_like(x)


def by_hand(model: nn.Module, loops: int, x: Tensor, mask: Tensor, c: Tensor, lam: float = LAM) -> dict[str, Any]:
    """`model` with its stream run `loops` times (in eval mode)."""
    keep, e = (mask > 0).unsqueeze(-1), lam / (loops * math.sqrt(3))
    x = model.embed(x)
    for _ in range(loops):
        hidden = []
        for sub in model.sub:
            x = x + e * (sub(x * keep) * model.gain)
            hidden.append(x)
            x = x + c
    return {"out": model.head(x), "hidden": hidden}


def assert_close(actual: Any, expected: Any) -> None:
    left, spec = pytree.tree_flatten(actual)
    right, other = pytree.tree_flatten(expected)
    assert spec == other
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@functools.cache
def rewritten_once(frontend: str, learnable: bool) -> resfx.Rewritten:
    return resfx.rewrite(made(Conditioned), resfx.ScaledLoop(0.5, 2, learnable), call(), frontend=frontend)


def looped(loops: int = 3, frontend: str = "export", learnable: bool = False) -> tuple[nn.Module, resfx.Rewritten]:
    rewritten = copy.deepcopy(rewritten_once(frontend, learnable))
    rewritten.set_loops(0, loops)
    return made(Conditioned), rewritten


@pytest.mark.parametrize("frontend", ["export", "fx"])
def test_set_loops_changes_the_count_without_a_new_capture(frontend: str) -> None:
    model, rewritten = looped(3, frontend)
    graph = rewritten.code
    for loops in (3, 1, 4):
        rewritten.set_loops(0, loops)
        assert_close(rewritten(*call()), by_hand(model, loops, *call()))
        assert rewritten.residual_map.forms == {0: f"scaled_loop(lam=0.5, loops={loops})"}
        assert f"loops={loops}" in str(rewritten.residual_map)
        assert f"loops={loops}" in repr(rewritten)
    assert rewritten.code == graph


def test_one_loop_is_the_plain_scaled_loop() -> None:
    model, rewritten = looped(1)
    plain = resfx.rewrite(model, resfx.ScaledLoop(LAM), call())
    for a, b in zip(*(pytree.tree_leaves(m(*call())) for m in (rewritten, plain)), strict=True):
        assert torch.equal(a, b)


def test_names_and_instances_stay() -> None:
    model = made(Conditioned)
    names, sub = list(model.state_dict()), model.sub[0]
    rewritten = resfx.rewrite(model, resfx.ScaledLoop(loops=2), call(), copy=False)
    assert list(rewritten.state_dict()) == names
    assert len(list(rewritten.parameters())) == len(list(model.parameters()))
    assert [n for n, m in rewritten.named_modules(remove_duplicate=False) if m is sub] == ["sub.0"]
    rewritten.load_state_dict(model.state_dict(), strict=True)


def test_the_body_runs_k_times_on_the_user_s_modules() -> None:
    _, rewritten = looped(3)
    seen: list[str] = []
    for name in ("sub.0", "sub.2", "embed", "residual.0.loop.body"):
        rewritten.get_submodule(name).register_forward_hook(lambda *_, name=name: seen.append(name))
    rewritten(*call())
    assert {name: seen.count(name) for name in seen} == {"sub.0": 3, "sub.2": 3, "embed": 1, "residual.0.loop.body": 3}


def test_a_module_replaced_later_is_the_one_that_runs() -> None:
    """As LoRA does it."""
    model, rewritten = looped(2)
    for owner in (model, rewritten):
        owner.sub[1] = nn.Linear(D, D, dtype=torch.float64)
    rewritten.sub[1].load_state_dict(model.sub[1].state_dict())
    assert_close(rewritten(*call()), by_hand(model, 2, *call()))


def test_a_copy_has_its_own_count_and_weights() -> None:
    model, rewritten = looped(2)
    copied = copy.deepcopy(rewritten)
    copied.set_loops(0, 4)
    with torch.no_grad():
        copied.gain.mul_(2)
        copied.sub[0].a.weight.mul_(2)
    assert_close(rewritten(*call()), by_hand(model, 2, *call()))
    assert rewritten.residual_map.forms == {0: "scaled_loop(lam=0.5, loops=2)"}
    with torch.no_grad():
        model.gain.mul_(2)
        model.sub[0].a.weight.mul_(2)
    assert_close(copied(*call()), by_hand(model, 4, *call()))


def test_train_mode_reaches_the_body() -> None:
    model, rewritten = looped(2)
    inputs, drawn = call(), []
    rewritten.train()
    rewritten.drop.register_forward_hook(lambda _, __, output: drawn.append(output == 0))
    rewritten(*inputs)
    assert len(drawn) == 6
    assert all((a != b).any() for a, b in pairwise(drawn))  # every repeat draws anew
    rewritten.eval()
    assert_close(rewritten(*call()), by_hand(model, 2, *call()))


def test_gradients_sum_over_the_repeats() -> None:
    model, rewritten = looped(3)
    rewritten(*call())["out"].sin().sum().backward()
    by_hand(model, 3, *call())["out"].sin().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(rewritten.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-12)


def test_learnable_lam_belongs_to_a_branch() -> None:
    model, rewritten = looped(3, learnable=True)
    new = {name: p for name, p in rewritten.named_parameters() if name.startswith("residual.")}
    assert set(new) == {f"residual.0.{branch}.lam" for branch in range(3)}
    assert_close(rewritten(*call()), by_hand(model, 3, *call()))
    rewritten(*call())["out"].sum().backward()
    assert all(p.grad is not None and p.grad != 0 for p in new.values())


def test_warm_start_is_the_model_run_k_times() -> None:
    model = made(Conditioned)
    rewritten = resfx.rewrite(model, resfx.ScaledLoop(loops=3), call(), warm_start=True)
    assert_close(rewritten(*call()), by_hand(model, 3, *call(), lam=3 * math.sqrt(3)))


def test_compile_and_export() -> None:
    model, rewritten = looped(2)
    compiled = torch.compile(rewritten, fullgraph=True, backend="aot_eager")
    for loops in (2, 3):
        rewritten.set_loops(0, loops)
        assert_close(compiled(*call()), by_hand(model, loops, *call()))
    program = torch.export.export(rewritten, call(), strict=False)
    assert list(program.state_dict) == list(model.state_dict())
    assert_close(program.module()(*call()), by_hand(model, 3, *call()))


def test_onnx(tmp_path: Path) -> None:
    model = made(Conditioned).float()
    inputs = tuple(t.float() if t.is_floating_point() else t for t in call())
    rewritten = resfx.rewrite(model, resfx.ScaledLoop(LAM, 2), inputs)
    resfx.export.to_onnx(rewritten, tmp_path / "model.onnx", inputs)
    import onnxruntime

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    feeds = {i.name: value.numpy() for i, value in zip(session.get_inputs(), inputs, strict=True)}
    expected = pytree.tree_leaves(by_hand(model, 2, *inputs))
    for actual, wanted in zip(session.run(None, feeds), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), wanted.detach(), rtol=1e-4, atol=1e-5)


def test_other_sizes_than_the_example_s() -> None:
    model, rewritten = looped(2)
    inputs = tuple(torch.cat([t, t, t])[:, :4] for t in call())
    assert_close(rewritten(*inputs), by_hand(model, 2, *inputs))


# Where a body can't be cut out, and wrong calls.


def test_wrong_counts_and_streams() -> None:
    model, rewritten = looped(2)
    for count in (0, -2, 1.5):
        with pytest.raises(resfx.FormError, match="loops"):
            rewritten.set_loops(0, count)
    with pytest.raises(resfx.LoopError, match=r"stream 7 .* are: 0"):
        rewritten.set_loops(7, 2)
    assert_close(rewritten(*call()), by_hand(model, 2, *call()))
    with pytest.raises(resfx.LoopError, match=r"ScaledLoop\(loops=1\)"):
        resfx.rewrite(model, resfx.ScaledLoop(), call()).set_loops(0, 2)


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = Sublayer(), Sublayer()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        x = x.flatten(0, 1)
        return x + self.g(x)


class Folded(Flattened):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(x.shape)


def test_unequal_ends() -> None:
    with pytest.raises(resfx.RewriteError, match="the same at both ends"):
        resfx.rewrite(made(Flattened), resfx.ScaledLoop(loops=2), (example(),))
    model, x = made(Folded), example()
    rewritten, y = resfx.rewrite(model, resfx.ScaledLoop(loops=2), (x,)), x
    for _ in range(2):
        for sub in (model.f, model.g):
            y = y + sub(y) / (2 * math.sqrt(2))
    torch.testing.assert_close(rewritten(x), y, rtol=1e-12, atol=1e-12)


class Joint(nn.Module):
    """Two streams that read each other."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.ModuleList(Sublayer() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for k in (0, 2):
            x, y = x + self.f[k](x + 2 * y), y + self.f[k + 1](y * x)
        return x * y


def test_joint_streams() -> None:
    with pytest.raises(resfx.RewriteError, match="stream 1 runs through it"):
        resfx.rewrite(made(Joint), resfx.ScaledLoop(loops=2), (example(), example()))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.ModuleList(Sublayer() for _ in range(2)), nn.ModuleList(Sublayer() for _ in range(2))
        self.mix = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        for sub in self.enc:
            source = source + sub(source)
        for sub, mix in zip(self.dec, self.mix, strict=True):
            target = target + sub(target) * mix(source)
        return target


def test_a_decoder_reads_the_encoder_s_end_in_every_repeat() -> None:
    model, x = made(EncoderDecoder), example()
    rewritten = resfx.rewrite(model, resfx.ScaledLoop(loops=2), (x, x + 1))
    rewritten.set_loops(1, 3)
    source, target = x, x + 1
    for _ in range(2):
        for sub in model.enc:
            source = source + sub(source) / (2 * math.sqrt(2))
    for _ in range(3):
        for sub, mix in zip(model.dec, model.mix, strict=True):
            target = target + sub(target) * mix(source) / (3 * math.sqrt(2))
    torch.testing.assert_close(rewritten(x, x + 1), target, rtol=1e-12, atol=1e-12)


class Nested(nn.Module):
    """Residuals in the branch of a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.ModuleList(Sublayer() for _ in range(2)), nn.Linear(D, D)

    def branch(self, x: Tensor, k: float = 1.0) -> Tensor:
        for sub in self.inner:
            x = x + k * sub(x)
        return self.out(x)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def test_what_lies_in_a_body_runs_as_often_as_all_bodies_around_it() -> None:
    """N of an inner branch counts the loops of both streams."""
    model, x = made(Nested), example()
    rewritten, y = resfx.rewrite(model, resfx.ScaledLoop(loops=2), (x,)), x
    lengths = {stream.index: len(stream.sites) for stream in rewritten.residual_map.streams}
    inner = next(index for index, sites in lengths.items() if sites == 2)
    rewritten.set_loops(inner, 3)
    for _ in range(2):
        z = y
        for _ in range(3):
            for sub in model.inner:
                z = z + sub(z) / (6 * math.sqrt(2))
        y = y + model.out(z) / 2
    torch.testing.assert_close(rewritten(x), y, rtol=1e-12, atol=1e-12)
