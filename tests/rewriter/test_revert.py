"""`revert`: the plain model comes back, whole or stream by stream, with the values of its tensors as they are now."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import resfx

FORMS = {
    "standard": resfx.Standard(),
    "delta": resfx.DeltaAttention(query_init_std=0.5),
    "delta_block": resfx.DeltaAttention(granularity="block", blocks=2, query_init_std=0.5),
    "attention_residual": resfx.AttentionResidual(query_init_std=0.5),
    "multi_gate": resfx.MultiGate(streams=2),
    "review": resfx.Review(),
    "highway": resfx.Highway(convex=True),
    "scaled_loop": resfx.ScaledLoop(learnable=True),
}


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.inner = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x)).tanh()


class TwoStreams(nn.Module):
    """Two stacks of different width: stream 0 is `low.*`, stream 1 is `high.*`. Root tensors, a buffer, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(5, 8))
        self.register_buffer("scale", torch.tensor(2.0))
        self.low = nn.Sequential(*(Block(8) for _ in range(3)))
        self.widen = nn.Linear(8, 12)
        self.high = nn.Sequential(*(Block(12) for _ in range(4)))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.high(self.widen(self.drop(self.low(x * self.scale + self.position))))


@pytest.fixture
def model() -> TwoStreams:
    torch.manual_seed(0)
    return TwoStreams().eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def residual(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if name.startswith("residual.")}


def shake(model: nn.Module) -> None:
    """Every new parameter somewhere else."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in residual(model).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.5)


def train_a_step(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).pow(2).mean().backward()
    optimizer.step()


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_plain_model_comes_back(form: resfx.Form, model: TwoStreams, x: Tensor) -> None:
    expected = model(x)
    rewritten = resfx.rewrite(model, form, (x,))
    shake(rewritten)
    if residual(rewritten):
        assert not torch.equal(rewritten(x), expected)
    plain = resfx.revert(rewritten)
    assert type(plain) is TwoStreams
    assert torch.equal(plain(x), expected)
    state = plain.state_dict()
    assert list(state) == list(model.state_dict())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_same_object_without_a_copy(model: TwoStreams, x: Tensor) -> None:
    rewritten = resfx.rewrite(model, resfx.Review(), (x,), copy=False)
    assert resfx.revert(rewritten) is model
    assert not hasattr(model, "residual")


def test_trained_values_are_kept(model: TwoStreams, x: Tensor) -> None:
    start = copy.deepcopy(model.state_dict())
    rewritten = resfx.rewrite(model, resfx.Review(), (x,))
    train_a_step(rewritten, x)
    plain = resfx.revert(rewritten)
    trained = plain.state_dict()
    for name, value in rewritten.state_dict().items():
        assert name.startswith("residual.") or torch.equal(trained[name], value)
    changed = {name for name in start if not torch.equal(trained[name], start[name])}
    assert changed == set(start) - {"scale"}
    reference = TwoStreams().eval()
    reference.load_state_dict(trained)
    assert torch.equal(plain(x), reference(x))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in start.items())


def test_casts_and_flags_are_kept(model: TwoStreams, x: Tensor) -> None:
    rewritten = resfx.rewrite(model, resfx.Review(), (x,)).double()
    rewritten.train()
    plain = resfx.revert(rewritten)
    assert {value.dtype for value in plain.state_dict().values()} == {torch.float64}
    assert all(module.training for module in plain.modules())
    rewritten.eval()
    assert not any(module.training for module in resfx.revert(rewritten).modules())
    expected = copy.deepcopy(model).double()(x.double())
    assert torch.equal(plain(x.double()), expected)


def test_replaced_root_tensors_are_kept(model: TwoStreams, x: Tensor) -> None:
    rewritten = resfx.rewrite(model, resfx.Review(), (x,))
    rewritten.position = nn.Parameter(torch.zeros(5, 8))
    assert torch.equal(resfx.revert(rewritten).position, torch.zeros(5, 8))


@pytest.mark.parametrize("frontend", ["export", "fx"])
@pytest.mark.parametrize("kept", [0, 1])
def test_one_stream_of_two(kept: int, frontend: str, model: TwoStreams, x: Tensor) -> None:
    both = resfx.rewrite(model, resfx.DeltaAttention(granularity="block", blocks=2), (x,), frontend=frontend)
    shake(both)
    before = both(x)
    one = resfx.revert(both, streams=1 - kept)

    assert one.residual_map.forms == {kept: both.residual_map.forms[kept]}
    assert residual(one) == {n: p for n, p in residual(both).items() if n.startswith(f"residual.{kept}.")}
    assert all(parameter is both.get_parameter(name) for name, parameter in one.named_parameters())
    assert set(one.residual_map.parameters) == set(residual(one))

    reference = resfx.rewrite(model, resfx.DeltaAttention(granularity="block", blocks=2), (x,), streams=kept)
    reference.load_state_dict(one.state_dict())
    assert torch.equal(one(x), reference(x))
    assert not torch.equal(one(x), before)
    assert not torch.equal(one(x), model(x))
    assert torch.equal(both(x), before)  # the model it was made from still runs


def test_stream_by_stream_to_the_plain_model(model: TwoStreams, x: Tensor) -> None:
    both = resfx.rewrite(model, resfx.MultiGate(streams=2), (x,), copy=False)
    one = resfx.revert(both, streams=[0])
    assert isinstance(one, resfx.Rewritten)
    assert resfx.revert(one, streams=[1]) is model
    assert resfx.revert(both, streams=[1, 0]) is model


def test_of_a_copy(model: TwoStreams, x: Tensor) -> None:
    both = resfx.rewrite(model, resfx.Review(), (x,))
    shake(both)
    before = both(x)
    one = resfx.revert(copy.deepcopy(both), streams=0)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.zero_()
    assert torch.equal(both(x), before)
    assert not one(x).any()


def test_selected_sites_and_warm_start_stay(model: TwoStreams, x: Tensor) -> None:
    first = resfx.rewrite(model, resfx.DeltaAttention(), (x,), select="high.[13]", warm_start=True)
    both = resfx.rewrite(first, resfx.Review(), (x,))
    one = resfx.revert(both, streams=0)
    assert set(residual(one)) == {f"residual.1.{s}.{n}" for s in (1, 3) for n in ("query", "key_norm", "warm")}
    assert torch.equal(one(x), model(x))


class OtherInTraining(TwoStreams):
    """Can be captured in eval mode only."""

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y = super().forward(x)
        return (y, y.mean()) if self.training else y


def test_eval_only_models_stay_so(x: Tensor) -> None:
    both = resfx.rewrite(OtherInTraining().eval(), resfx.Review(), (x,))
    one = resfx.revert(both, streams=0)
    assert not one.trains
    with pytest.raises(resfx.CaptureError, match="eval mode only"):
        one.train()
    assert resfx.revert(both).train()(x)[1].dim() == 0


def test_a_result_that_leaves_train_mode_says_so(x: Tensor) -> None:
    with pytest.warns(UserWarning, match="in train mode, the result in eval mode") as caught:
        result = resfx.rewrite(OtherInTraining().train(), resfx.Review(), (x,))
    assert not result.training
    assert caught[0].filename == __file__


def test_errors(model: TwoStreams, x: Tensor) -> None:
    with pytest.raises(resfx.NotRewritten, match="TwoStreams is not rewritten and can't be reverted: pass what"):
        resfx.revert(model)
    rewritten = resfx.rewrite(model, resfx.Review(), (x,), streams=1)
    with pytest.raises(resfx.NotRewritten, match="pass the module it wraps, its `_orig_mod`"):
        resfx.revert(torch.compile(rewritten))
    with pytest.raises(resfx.SelectionError, match="stream 0 is not rewritten; the rewritten ones: 1"):
        resfx.revert(rewritten, streams=[1, 0])
    with pytest.raises(resfx.SelectionError, match="reverts nothing"):
        resfx.revert(rewritten, streams=[])
