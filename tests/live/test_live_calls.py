"""Whoever calls an attached model, or a part of it that holds a stream, runs it rewritten; detached, it is plain again."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import live_toys
import pytest
import torch
from live_helpers import Pair, assert_close, perturb, worst
from torch import nn

import resfx

FORM = resfx.DeltaAttention()


@pytest.fixture(scope="module")
def pair() -> Pair:
    return Pair(live_toys.model, FORM, (live_toys.inputs(),))


def test_shapes_dtypes_and_gradients(pair: Pair) -> None:
    pair.assert_same(live_toys.inputs())
    pair.assert_same(live_toys.inputs(3, 7))
    pair.assert_same(live_toys.inputs(1, 1))
    with torch.no_grad():
        pair.assert_same(live_toys.inputs(2, 6), gradients=False)


def test_forward_called_directly(pair: Pair) -> None:
    x = live_toys.inputs()
    assert_close([pair.live.forward(x)], [pair.static(x)])
    assert inspect.signature(pair.live.forward) == inspect.signature(pair.plain.forward)


def test_a_part_called_by_itself(pair: Pair) -> None:
    """A library's generate calls the encoder alone."""
    x = live_toys.inputs()
    assert isinstance(pair.live, live_toys.Model)
    assert isinstance(pair.plain, live_toys.Model)
    encoded = pair.live.encode(x)
    assert_close([pair.live.head(encoded)], [pair.static(x)])
    assert worst([encoded], [pair.plain.encode(x)]) > 1e-3


def test_inside_of_another_compiled_function(pair: Pair) -> None:
    x = live_toys.inputs()

    @torch.compile(backend="eager")
    def step(value: torch.Tensor) -> Any:
        return pair.live(value * 2).sum()

    assert_close([step(x)], [pair.static(x * 2).sum()])


def test_a_copy_is_attached_by_itself(pair: Pair) -> None:
    x = live_toys.inputs()
    twin = copy.deepcopy(pair.live)
    assert_close([twin(x)], [pair.static(x)])
    perturb(twin, seed=5)
    changed = twin(x)
    assert worst([changed], [pair.static(x)]) > 1e-3
    assert_close([pair.live(x)], [pair.static(x)])
    resfx.detach(twin)
    assert_close([twin(x)], [pair.plain(x)])
    assert_close([pair.live(x)], [pair.static(x)])


def test_a_frozen_parameter_gets_no_gradient(pair: Pair) -> None:
    twin = copy.deepcopy(pair.live)
    new = [p for name, p in twin.named_parameters() if name.startswith("residual.")]
    twin(live_toys.inputs()).sum().backward()
    assert all(p.grad is not None for p in new)
    twin.zero_grad()
    new[0].requires_grad_(False)
    twin(live_toys.inputs()).sum().backward()
    assert [p.grad is None for p in new] == [True, *[False] * (len(new) - 1)]
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter is new[0])
    twin(live_toys.inputs()).sum().backward()
    assert new[0].grad is not None


def test_another_dtype(pair: Pair) -> None:
    live, static = copy.deepcopy(pair.live).double(), copy.deepcopy(pair.static).double()
    x = live_toys.inputs().double()
    assert_close([live(x)], [static(x)], 1e-12)


def test_a_functional_call_with_other_parameters(pair: Pair) -> None:
    x = live_toys.inputs()
    other = {name: value + 1 for name, value in pair.live.named_parameters() if name.startswith("residual.")}
    mine = torch.func.functional_call(pair.live, other, (x,))
    assert worst([mine], [pair.live(x)]) > 1e-3
    assert_close([mine], [torch.func.functional_call(pair.static, other, (x,))])


def test_several_models_in_one_process() -> None:
    """Ten of one class: Dynamo counts recompilations of a function over all of them."""
    x = live_toys.inputs()
    torch._dynamo.reset()
    for seed in range(10):
        model = live_toys.model()
        resfx.attach(model, FORM, (x,), backend="eager")
        plain = live_toys.model()(x)
        perturb(model, seed=seed)
        assert worst([model(x)], [plain]) > 1e-3


def test_detach_gives_the_plain_model_back() -> None:
    model, x = live_toys.model(), live_toys.inputs()
    before, attributes = copy.deepcopy(model.state_dict()), set(vars(model))
    plain = model(x)
    resfx.attach(model, FORM, (x,), backend="eager")
    perturb(model)
    assert worst([model(x)], [plain]) > 1e-3
    assert resfx.detach(model) is model
    assert torch.equal(model(x), plain)
    assert list(model.state_dict()) == list(before)
    assert set(vars(model)) == attributes
    assert all("forward" not in vars(module) for module in model.modules())
    resfx.attach(model, FORM, (x,), backend="eager")  # and again
    resfx.detach(model)
    with pytest.raises(resfx.LiveError, match="not attached"):
        resfx.detach(model)


def test_detach_leaves_a_forward_of_the_instance() -> None:
    model, x = live_toys.model(), live_toys.inputs()
    own = model.forward
    model.forward = own
    resfx.attach(model, FORM, (x,), backend="eager")
    resfx.detach(model)
    assert vars(model)["forward"] is own


def test_a_wrapper_around_forward_is_looked_through() -> None:
    """accelerate puts autocast around an instance's forward."""
    model, x = live_toys.model(), live_toys.inputs()
    plain = model(x)
    resfx.attach(model, FORM, (x,), backend="eager")
    perturb(model)
    model.forward = torch.no_grad()(model.forward)
    assert worst([model(x)], [plain]) > 1e-3
    resfx.detach(model)
    assert torch.equal(model(x), plain)


def test_a_sequential_root() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), live_toys.Block(), live_toys.Block())

    Pair(make, FORM, (live_toys.inputs(),)).assert_same(live_toys.inputs())


class TokensFirst(live_toys.Block):
    """Updates all but the first token, and reads them before the two are joined again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x[:, 1:] + self.a(x[:, 1:])
        update = self.b(self.norm1(tokens))
        return torch.cat([x[:, :1], tokens], 1) + torch.cat([update.mean(1, keepdim=True), update], 1)


def test_parts_that_are_read_before_they_are_joined() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(TokensFirst(), TokensFirst())

    pair = Pair(make, FORM, (live_toys.inputs(),))
    assert len(pair.static.residual_map.sites) == 4
    pair.assert_same(live_toys.inputs(3, 7))


def test_a_state_dict_moves_between_the_modes(pair: Pair) -> None:
    live, x = live_toys.model(), live_toys.inputs()
    resfx.attach(live, FORM, (x,), backend="eager")
    live.load_state_dict(pair.static.state_dict())
    assert_close([live(x)], [pair.static(x)])
    fresh = resfx.rewrite(live_toys.model(), FORM, (x,))
    fresh.load_state_dict(live.state_dict())
    assert_close([fresh(x)], [live(x)])


def test_an_attached_model_is_not_pickled_nor_exported(pair: Pair) -> None:
    with pytest.raises(resfx.LiveError, match="state_dict"):
        pickle.dumps(pair.live)
    with pytest.raises(resfx.LiveError, match=r"resfx\.rewrite"):
        torch.export.export(pair.live, (live_toys.inputs(),))


def test_the_registered_backend_compiles_what_is_around_it(pair: Pair) -> None:
    x = live_toys.inputs()

    @torch.compile(backend="resfx", options={"backend": "eager"})
    def step(value: torch.Tensor) -> Any:
        return (pair.live(value * 2) * 3).sum()

    assert_close([step(x)], [(pair.static(x * 2) * 3).sum()])
    plain = torch.compile(live_toys.model(), backend="resfx", options={"backend": "eager"})
    with pytest.warns(UserWarning, match=r"stays plain \(4 sites from .*live_toys"):
        plain(x)


def test_generate_of_a_static_rewrite_names_attach(pair: Pair) -> None:
    with pytest.raises(resfx.NotOnRewritten, match=r"resfx\.attach"):
        pair.static.generate()


def test_a_hook_that_comes_later(pair: Pair) -> None:
    x = live_toys.inputs()
    assert isinstance(pair.live, live_toys.Model)
    before = pair.live(x)
    hook = pair.live.stack.layers[0].register_forward_hook(lambda module, args, output: output * 3)
    assert worst([pair.live(x)], [before]) > 1e-3
    hook.remove()
    assert_close([pair.live(x)], [before])


def test_a_hook_on_a_module_that_comes_later() -> None:
    x, model = live_toys.inputs(), live_toys.model()
    resfx.attach(model, FORM, (x,), backend="eager")
    perturb(model)
    model(x)
    model.embed = nn.Sequential(model.embed)
    before = model(x)
    hook = model.embed.register_forward_hook(lambda module, args, output: output * 3)
    first = model(x)
    hook.remove()
    model.embed.register_forward_hook(lambda module, args, output: output * 5)
    assert worst([first], [before]) > 1e-3
    assert worst([model(x)], [first]) > 1e-3


class CopiesInto(nn.Module):
    """The state is written by `copy_`, and a part of it again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.copy_(x + self.first(x))
        x[:, 0] = 0
        x.narrow(1, 1, 1).add_(x.select(1, 2)[:, None])
        return x + self.second(x)


def test_a_state_that_is_copied_into() -> None:
    model, x = CopiesInto().eval(), torch.randn(2, 5, 8)
    expected = model(x)
    found = resfx.attach(model, resfx.Standard(), (x,), backend="eager")
    assert sum(len(stream.sites) for stream in found.streams) == 2
    assert torch.allclose(model(x), expected, atol=1e-6)
