"""`save` and `load`: the same model comes back from safetensors and JSON, and only into the architecture it was saved from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_models import FORMS, TOKENS, Block, Tied, assert_same, rewritten, tied
from safetensors.torch import load_file
from torch import Tensor, nn

import resfx

# What comes back.


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_round_trip(form: resfx.Form, folder: Path) -> None:
    saved = rewritten(form)
    resfx.save(saved, folder)
    original = tied(1)
    start = {name: value.clone() for name, value in original.state_dict().items()}
    loaded = resfx.load(original, folder, (TOKENS,))
    assert_same(loaded, saved)
    assert all(torch.equal(original.state_dict()[name], value) for name, value in start.items())


def test_sites_warm_start_and_training(folder: Path) -> None:
    saved = rewritten(resfx.DeltaAttention(query_init_std=0.5), select="blocks.[12]", warm_start=True)
    resfx.save(saved, folder)
    loaded = resfx.load(tied(1).train(), folder, (TOKENS,))
    assert loaded.training
    assert_same(loaded, saved)
    assert "residual.0.1.warm" in dict(loaded.named_parameters())
    loaded(TOKENS).sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_loops_set_at_run_time(folder: Path) -> None:
    saved = rewritten(resfx.ScaledLoop(loops=2))
    saved.set_loops(0, 3)
    resfx.save(saved, folder)
    assert_same(resfx.load(tied(1), folder, (TOKENS,)), saved)


def test_without_a_copy(folder: Path) -> None:
    saved = rewritten()
    resfx.save(saved, folder)
    original = tied(1)
    weight = original.embed.weight
    loaded = resfx.load(original, folder, (TOKENS,), copy=False)
    assert_same(loaded, saved)
    assert loaded.embed.weight is weight
    assert resfx.revert(loaded) is original


def test_composed_and_further_rewritten(folder: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = tied(0, out=6, tie=False), nn.Sequential(Block(6), Block(6), Block(6))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.second(self.first(tokens))

    model = Two().eval()
    both = rewritten(resfx.DeltaAttention(), rewritten(resfx.MultiGate(streams=2), model, select="first.*"))
    assert len(both.residual_map.forms) == 2
    resfx.save(both, folder)
    loaded = resfx.load(model, folder, (TOKENS,))
    assert_same(loaded, both)
    assert torch.equal(resfx.revert(loaded, streams=0)(TOKENS), resfx.revert(both, streams=0)(TOKENS))


def test_no_pickle_and_public_format(folder: Path) -> None:
    saved = rewritten()
    resfx.save(saved, folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "constants.safetensors",
        "model.safetensors",
        "resfx.json",
    ]
    stored = load_file(folder / "model.safetensors")
    assert set(stored) == set(saved.state_dict()) - {"head.weight"}
    assert set(load_file(folder / "constants.safetensors")) == {"offset"}
    record = json.loads((folder / "resfx.json").read_text())
    assert record["format"] == 1
    assert record["rewritten"] == [{"stream": 0, "form": "review", "warm_start": False, "sites": [0, 1, 2]}]
    assert record["streams"][0][1] == {"path": "blocks.1", "kind": "plain", "size": 8, "branches": 1, "branch_id": 1}
    assert record["shared"] == {"head.weight": "embed.weight"}
    assert {"resfx", "torch", "safetensors", "python"} <= set(record["versions"])


@pytest.mark.parametrize("tie", [True, False])
def test_shared_weights_stay_shared(tie: bool, folder: Path) -> None:
    resfx.save(rewritten(), folder)
    loaded = resfx.load(tied(1, tie=tie), folder, (TOKENS,))
    assert loaded.head.weight is loaded.embed.weight
    loaded(TOKENS).sum().backward()
    assert len({id(p) for p in loaded.parameters()}) == len(list(loaded.parameters()))


def test_shared_memory_stays_shared(folder: Path) -> None:
    def separate(seed: int, dtype: torch.dtype = torch.float32) -> Tied:
        model = tied(seed).to(dtype)
        model.head.weight = nn.Parameter(model.embed.weight.data)  # two parameters on one memory
        return model

    saved = rewritten(model=separate(0), copy=False)
    resfx.save(saved, folder)
    assert "head.weight" not in load_file(folder / "model.safetensors")
    for dtype in (torch.float32, torch.float64):
        loaded = resfx.load(separate(1, dtype), folder, (TOKENS,), copy=False)
        assert_same(loaded, saved)
        assert loaded.head.weight is not loaded.embed.weight
        assert loaded.head.weight.data_ptr() == loaded.embed.weight.data_ptr()


def test_dtype_is_the_saved_one(folder: Path) -> None:
    saved = rewritten().bfloat16()
    resfx.save(saved, folder)
    assert_same(resfx.load(tied(1), folder, (TOKENS,)), saved)
    assert_same(resfx.load(tied(1).double(), folder, (TOKENS,), copy=False), saved)


def test_meta_models_are_materialised(folder: Path) -> None:
    saved = rewritten()
    resfx.save(saved, folder)
    with torch.device("meta"):
        original = Tied().eval()
    loaded = resfx.load(original, folder, (TOKENS,))
    assert_same(loaded, saved)
    assert loaded.head.weight is loaded.embed.weight
    assert loaded.embed.weight.requires_grad
    assert original.embed.weight.is_meta
    assert torch.equal(loaded.offset, saved.offset)


def test_meta_buffer_of_unknown_value(folder: Path) -> None:
    resfx.save(rewritten(), folder)
    (folder / "constants.safetensors").unlink()
    original = tied(1)
    original.offset = original.offset.to("meta")
    with pytest.raises(resfx.CheckpointError, match="buffer offset is on the meta device and not in the checkpoint"):
        resfx.load(original, folder, (TOKENS,))


def test_frozen_parameters_stay_frozen(folder: Path) -> None:
    resfx.save(rewritten(), folder)
    loaded = resfx.load(tied(1).requires_grad_(False), folder, (TOKENS,))
    assert {name for name, p in loaded.named_parameters() if p.requires_grad} == {
        f"residual.0.{site}.{name}" for site in range(3) for name in ("weight", "bias")
    }


def test_shards(folder: Path) -> None:
    saved, limit = rewritten(), 600
    resfx.save(saved, folder, max_shard_bytes=limit)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    assert len(files) == len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(v.nbytes for n, v in saved.state_dict().items() if n != "head.weight")
    for file in files:
        held = load_file(file)
        assert len(held) == 1 or sum(value.nbytes for value in held.values()) <= limit
        assert all(index["weight_map"][name] == file.name for name in held)
    assert_same(resfx.load(tied(1), folder, (TOKENS,)), saved)
