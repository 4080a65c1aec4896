"""Frozen and adapted bases, and the parameter groups for an optimizer."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import resfx

D = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Net(nn.Module):
    """A small language model with a tied head; `loops` runs its blocks so many times."""

    def __init__(self, blocks: int = 3, loops: int = 1) -> None:
        super().__init__()
        self.loops = loops
        self.table, self.position = nn.Embedding(11, D), nn.Parameter(torch.randn(1, 1, D))
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.position
        for _ in range(self.loops):
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


IDS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
FORMS = [
    resfx.DeltaAttention(gate="vector"), resfx.AttentionResidual(), resfx.MultiGate(streams=2), resfx.Review(), resfx.Highway(),
    resfx.ScaledLoop(learnable=True), resfx.Standard(),
]  # fmt: skip


def net(**options: int) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def is_new(name: str) -> bool:
    return name.startswith("residual.")


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}


def step(model: nn.Module, groups: list[dict[str, object]]) -> set[str]:
    """One step of training; the names of the parameters that moved."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}


@pytest.mark.parametrize("copied", [True, False])
def test_a_frozen_base_stays_frozen(copied: bool) -> None:
    model = net()
    model.requires_grad_(False)
    model.blocks[1].norm.requires_grad_(True)
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    result = resfx.rewrite(model, resfx.Review(), (IDS,), copy=copied)
    assert {n: p.requires_grad for n, p in result.named_parameters(remove_duplicate=False) if not is_new(n)} == flags
    assert {n: p.requires_grad for n, p in model.named_parameters(remove_duplicate=False) if not is_new(n)} == flags
    new = set(result.residual_map.parameters)
    assert trainable(result) == new | {"blocks.1.norm.weight", "blocks.1.norm.bias"}
    assert trainable(copy.deepcopy(result)) == trainable(result)
    assert step(result, resfx.parameter_groups(result, 1e-2)) == trainable(result)


class LoRA(nn.Module):
    """A linear layer, frozen, with a trainable low-rank update beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down, self.up = (
            nn.Parameter(torch.randn(2, linear.in_features)),
            nn.Parameter(torch.zeros(linear.out_features, 2)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x @ self.down.T @ self.up.T


def test_a_base_with_lora_by_hand() -> None:
    model = net().requires_grad_(False)
    for block in model.blocks:
        block.fc1 = LoRA(block.fc1)
    adapters = trainable(model)
    result = resfx.rewrite(model, resfx.DeltaAttention(), (IDS,), warm_start=True)
    assert trainable(result) == adapters | set(result.residual_map.parameters)
    assert torch.allclose(result(IDS), model(IDS), rtol=1e-5, atol=1e-5)
    moved = step(result, resfx.parameter_groups(result, 1e-2))
    assert moved >= adapters
    assert moved <= trainable(result)
    assert any(is_new(name) for name in moved)


@pytest.fixture(scope="module")
def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 11, "hidden_size": D, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model


def test_a_base_that_peft_has_wrapped(llama: nn.Module) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(llama), peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    adapters = trainable(model)
    assert len(adapters) == 8
    result = resfx.rewrite(model.eval(), resfx.DeltaAttention(), (), {"input_ids": IDS})
    assert trainable(result) == adapters | set(result.residual_map.parameters)
    groups = {group["name"]: group for group in resfx.parameter_groups(result, 1e-3)}
    assert {name: len(group["params"]) for name, group in groups.items()} == {"base, decay": 8, "residual": 6}


def test_peft_on_a_rewritten_model(llama: nn.Module) -> None:
    """peft freezes all but its own; an adapter has the learning rate of the branch it stands in."""
    peft = pytest.importorskip("peft")
    model = resfx.rewrite(llama, resfx.ScaledLoop(learnable=True), (), {"input_ids": IDS})
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2))
    model.residual.requires_grad_(True)
    groups = {group["name"]: group for group in resfx.parameter_groups(adapted, 1e-3, 1e-2)}
    assert {name: len(group["params"]) for name, group in groups.items()} == {"base, decay, lr * 0.5": 8, "residual": 4}
    assert groups["base, decay, lr * 0.5"]["lr"] == pytest.approx(1e-3 / math.sqrt(4))
    assert len(resfx.measure(adapted, (), {"input_ids": IDS}).sites) == 4


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.to_spec())
def test_every_trainable_parameter_is_in_one_group(form: resfx.Form) -> None:
    model = resfx.rewrite(net(), form, (IDS,))
    model.blocks[0].fc2.bias.requires_grad_(False)
    groups = resfx.parameter_groups(model, 1e-3, residual_lr=1e-2, weight_decay=0.2)
    grouped = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(grouped) == sorted({id(parameter) for parameter in model.parameters() if parameter.requires_grad})
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in groups:
        assert set(group) == {"params", "lr", "weight_decay", "name"}
        assert group["params"]
        for parameter in group["params"]:
            name = names[id(parameter)]
            decays = name.split(".")[-1] == "weight" and ("fc1" in name or "fc2" in name) and not is_new(name)
            assert group["weight_decay"] == (0.2 if decays else 0.0), name
            assert is_new(name) == (group["name"] == "residual"), name
            if is_new(name):
                assert group["lr"] == 1e-2
            elif not isinstance(form, resfx.ScaledLoop):
                assert group["lr"] == 1e-3
    for optimizer in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        assert len(optimizer(groups, lr=1.0).param_groups) == len(groups)


def rates(blocks: int, loops: int, form: resfx.Form, **options: object) -> dict[str, float]:
    """The learning rate of every parameter, with 1 as the user's."""
    model = resfx.rewrite(net(blocks=blocks, loops=loops), form, (IDS,), **options)  # type: ignore[arg-type]
    found = {id(p): group["lr"] for group in resfx.parameter_groups(model, 1.0, 0.3) for p in group["params"]}
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def test_the_rate_of_a_scaled_stream_depends_on_l_alone() -> None:
    for blocks in (1, 2, 4):
        expected = 1 / math.sqrt(blocks)
        found = [rates(blocks, loops, resfx.ScaledLoop(lam=0.7)) for loops in (1, 3)]
        found.append(rates(blocks, 1, resfx.ScaledLoop(loops=5, learnable=True)))
        for each in found:
            assert {rate for name, rate in each.items() if name.startswith("blocks.")} == {expected}
            assert {each[name] for name in ("table.weight", "position", "norm.weight")} == {1.0}
            assert {rate for name, rate in each.items() if is_new(name)} <= {0.3}


def test_sites_that_are_not_scaled_keep_the_rate() -> None:
    some = rates(4, 1, resfx.ScaledLoop(), select=["blocks.0", "blocks.2"])
    assert {some["blocks.0.fc1.weight"], some["blocks.2.norm.bias"]} == {0.5}
    assert {some["blocks.1.fc1.weight"], some["blocks.3.fc2.bias"]} == {1.0}
    warm = rates(4, 1, resfx.ScaledLoop(), warm_start=True)
    assert {rate for name, rate in warm.items() if not is_new(name)} == {1.0}


def test_freeze_base() -> None:
    model = resfx.rewrite(net(), resfx.Review(), (IDS,))
    model.residual.get_submodule("0.1").requires_grad_(False)
    groups = resfx.parameter_groups(model, 1e-2, freeze_base=True)
    assert [group["name"] for group in groups] == ["residual"]
    assert trainable(model) == {f"residual.0.{site}.{name}" for site in (0, 2) for name in ("weight", "bias")}
    assert step(model, groups) == trainable(model)
    assert all(parameter.grad is None for name, parameter in model.named_parameters() if not is_new(name))


def test_nothing_to_train() -> None:
    with pytest.raises(resfx.TrainingError, match="no form has added parameters"):
        resfx.parameter_groups(resfx.rewrite(net(), resfx.Standard(), (IDS,)), 1e-3, freeze_base=True)
    with pytest.raises(resfx.TrainingError, match="set requires_grad"):
        resfx.parameter_groups(net().requires_grad_(False), 1e-3)


def test_a_plain_model_is_all_base() -> None:
    groups = {group["name"]: group for group in resfx.parameter_groups(net(), 1e-3)}
    assert set(groups) == {"base, decay", "base, no decay"}
    assert len(groups["base, decay"]["params"]) == 6
    assert [group["weight_decay"] for group in groups.values()] == (
        [0.0, 0.1] if next(iter(groups)) == "base, no decay" else [0.1, 0.0]
    )
