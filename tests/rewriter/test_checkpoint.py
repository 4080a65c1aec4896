"""`save` and `load`: the same model comes back from safetensors and JSON, and only into the architecture it was saved from."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import resfx
from resfx import checkpoint_files

FORMS = {
    "standard": resfx.Standard(),
    "delta": resfx.DeltaAttention(null_source=True, gate="vector"),
    "delta_block": resfx.DeltaAttention(granularity="block", blocks=2, query_init_std=0.5),
    "attention_residual": resfx.AttentionResidual(eps=1e-5),
    "multi_gate": resfx.MultiGate(streams=2, gate="competitive", b_base=-4.5),
    "review": resfx.Review(),
    "highway": resfx.Highway(convex=True),
    "scaled_loop": resfx.ScaledLoop(lam=0.7, learnable=True),
}


class Block(nn.Module):
    def __init__(self, size: int, keep: float = 1.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.inner = nn.Linear(size, size)
        self.keep = keep

    def forward(self, x: Tensor) -> Tensor:
        return self.keep * x + self.inner(self.norm(x)).tanh()


class Tied(nn.Module):
    """A language model with tied embeddings, a persistent and a non-persistent buffer and a counter."""

    def __init__(self, size: int = 8, depth: int = 3, out: int = 11, tie: bool = True, keep: float = 1.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, size)
        self.blocks = nn.ModuleList(Block(size, keep) for _ in range(depth))
        self.head = nn.Linear(size, out, bias=False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("steps", torch.tensor([3]))
        self.register_buffer("offset", torch.arange(size) / size, persistent=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.offset
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.tensor([[1, 4, 2, 7, 9], [0, 3, 10, 5, 5]])


def tied(seed: int = 0, **options: Any) -> Tied:
    torch.manual_seed(seed)
    return Tied(**options).eval()


def shake(model: nn.Module) -> None:
    """All parameters, the new ones too, somewhere else."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)


@functools.cache
def review() -> resfx.Rewritten:
    return resfx.rewrite(tied(), resfx.Review(), (TOKENS,))


def rewritten(form: resfx.Form | None = None, model: nn.Module | None = None, **options: Any) -> resfx.Rewritten:
    """By default `tied()` in Review; other numbers at every call."""
    if form is None and model is None:
        result = copy.deepcopy(review())
    else:
        result = resfx.rewrite(model or tied(), form or resfx.Review(), (TOKENS,), **options)
    shake(result)
    return result


def assert_same(loaded: resfx.Rewritten, saved: resfx.Rewritten) -> None:
    assert torch.equal(loaded(TOKENS), saved(TOKENS))
    expected, state = saved.state_dict(), loaded.state_dict()
    assert list(state) == list(expected)
    for name, value in expected.items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name], value), name
    assert loaded.residual_map.forms == saved.residual_map.forms


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


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


# What is refused.


class Renamed(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.layers = self.blocks
        del self.blocks

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale + self.offset
        for block in self.layers:
            x = block(x)
        return self.head(x)


def looped() -> Tied:
    """The same names and sizes; the last block runs the first one's weights."""
    model = tied(1)
    model.blocks[2] = model.blocks[0]
    return model


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "deeper": (lambda: tied(depth=4), r"site 3 of stream 0 \(module blocks.3, .*\) is not in the checkpoint"),
    "shallower": (lambda: tied(depth=2), r"site 2 of stream 0 \(module blocks.2, .*\) is not in the model"),
    "wider": (lambda: tied(size=12), r"site 0 of stream 0 was saved as .* D=8, .*; the model has .* D=12, "),
    "renamed": (lambda: Renamed().eval(), r"site 0 of stream 0 was saved as module blocks.0, .* module layers.0"),
    "scaled": (lambda: tied(keep=0.5), r"site 0 of stream 0 was saved as .* plain, .* scaled"),
    "looped": (looped, r"site 2 of stream 0 was saved as .* branch number 2; .* branch number 0"),
}


@pytest.mark.parametrize(("build", "message"), ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_other_architecture(build: Callable[[], nn.Module], message: str, folder: Path) -> None:
    resfx.save(rewritten().bfloat16(), folder)
    original = build()
    start = {name: value.clone() for name, value in original.state_dict().items()}
    with pytest.raises(resfx.CheckpointError, match=message):
        resfx.load(original, folder, (TOKENS,), copy=False)
    for name, value in original.state_dict().items():
        assert torch.equal(value, start[name]), name


def test_meta_model_of_another_architecture_is_left_alone(folder: Path) -> None:
    resfx.save(rewritten(), folder)
    with torch.device("meta"):
        original = Tied(depth=4).eval()
    with pytest.raises(resfx.CheckpointError, match="site 3 of stream 0"):
        resfx.load(original, folder, (TOKENS,), copy=False)
    assert all(parameter.is_meta for parameter in original.parameters())
    assert original.head.weight is original.embed.weight


def test_tensors_that_do_not_fit(folder: Path) -> None:
    resfx.save(rewritten(), folder)
    more = tied(1)
    more.head.register_parameter("bias", nn.Parameter(torch.zeros(11)))
    with pytest.raises(resfx.CheckpointError, match=r"not in the checkpoint: head.bias\. Pass the model"):
        resfx.load(more, folder, (TOKENS,))
    fewer = tied(1)
    fewer.blocks[1].inner.bias = None
    with pytest.raises(resfx.CheckpointError, match=r"not in the model: blocks.1.inner.bias\. Pass"):
        resfx.load(fewer, folder, (TOKENS,))
    other = tied(1, out=13, tie=False)
    with pytest.raises(resfx.CheckpointError, match=r"head.weight \(saved \(11, 8\), the model has \(13, 8\)\)"):
        resfx.load(other, folder, (TOKENS,))


def test_tied_model_of_an_untied_checkpoint(folder: Path) -> None:
    resfx.save(rewritten(model=tied(tie=False)), folder)
    with pytest.raises(resfx.CheckpointError, match=r"two in the checkpoint: head.weight and embed.weight"):
        resfx.load(tied(1), folder, (TOKENS,))


@pytest.mark.parametrize("name", ["residual.0.1.weight", "blocks.2.norm.bias"])
def test_missing_and_unexpected_in_the_file(name: str, folder: Path) -> None:
    resfx.save(rewritten(), folder)
    stored = load_file(folder / "model.safetensors")
    value = stored.pop(name)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(resfx.CheckpointError, match=rf"not in the checkpoint: {name}\. Pass"):
        resfx.load(tied(1), folder, (TOKENS,))
    save_file({**stored, name: value, f"{name}2": value.clone()}, folder / "model.safetensors")
    with pytest.raises(resfx.CheckpointError, match=rf"not in the model: {name}2\. Pass"):
        resfx.load(tied(1), folder, (TOKENS,))


def damage_json(folder: Path) -> None:
    (folder / "resfx.json").write_text('{"format": 1, "rewr')


def forget_streams(folder: Path) -> None:
    (folder / "resfx.json").write_text('{"format": 1, "rewritten": [], "shared": {}, "versions": {}}')


def newer_format(folder: Path) -> None:
    (folder / "resfx.json").write_text('{"format": 2, "versions": {"resfx": "9.0"}}')


def cut_tensors(folder: Path) -> None:
    file = next(iter(sorted(folder.glob("model-*.safetensors"))))
    file.write_bytes(file.read_bytes()[:-8])


def lose_shard(folder: Path) -> None:
    next(iter(sorted(folder.glob("model-*.safetensors")))).unlink()


def point_elsewhere(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    file.write_text(file.read_text().replace('"model-', '"../model-'))


def unknown_form(folder: Path) -> None:
    file = folder / "resfx.json"
    file.write_text(file.read_text().replace('"review"', '"later"'))


DAMAGE: dict[str, tuple[Callable[[Path], None], type[resfx.ResfxError], str]] = {
    "json": (damage_json, resfx.CheckpointError, "resfx.json is damaged .*: save the checkpoint again"),
    "streams": (forget_streams, resfx.CheckpointError, "resfx.json is damaged .*streams"),
    "format": (newer_format, resfx.CheckpointError, r"has format 2, .* up to 1: update resfx .*saved by 9\.0"),
    "cut": (cut_tensors, resfx.CheckpointError, "model-00001-of-.*safetensors is damaged"),
    "shard": (lose_shard, resfx.CheckpointPathError, "model-00001-of-.*safetensors is missing"),
    "escape": (point_elsewhere, resfx.CheckpointError, "index.json is damaged .*files in this folder"),
    "form": (unknown_form, resfx.FormError, "unknown form 'later'"),
}


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged(damage: Callable[[Path], None], error: type[resfx.ResfxError], message: str, folder: Path) -> None:
    resfx.save(rewritten(), folder, max_shard_bytes=600)
    damage(folder)
    with pytest.raises(error, match=message):
        resfx.load(tied(1), folder, (TOKENS,))


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(resfx.CheckpointPathError, match=r"resfx.json can't be read .*that resfx.save has written"):
        resfx.load(tied(), tmp_path, (TOKENS,))
    (tmp_path / "resfx.json").write_text("[]")
    with pytest.raises(resfx.CheckpointError, match="no checkpoint of resfx"):
        resfx.load(tied(), tmp_path, (TOKENS,))
    with pytest.raises(resfx.CheckpointError, match=r"takes the original model .* resfx.revert"):
        resfx.load(rewritten(), tmp_path, (TOKENS,))


def test_what_cannot_be_saved(folder: Path) -> None:
    with pytest.raises(resfx.NotRewritten, match="Tied is not rewritten and can't be saved"):
        resfx.save(tied(), folder)
    with pytest.raises(resfx.CheckpointError, match="max_shard_bytes=0"):
        resfx.save(rewritten(), folder, max_shard_bytes=0)
    model = rewritten()
    model.scale = torch.tensor(2.0, device="meta")
    with pytest.raises(resfx.CheckpointError, match="scale: on the meta device"):
        resfx.save(model, folder)
    model.scale = torch.tensor(2.0, dtype=torch.complex128)
    with pytest.raises(resfx.CheckpointError, match="complex128"):
        resfx.save(model, folder)

    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"scale": 1}

    with_extra = tied()
    with_extra.head = Extra(8, 11)
    with pytest.raises(resfx.CheckpointError, match=r"module `head` \(Extra\) has extra state"):
        resfx.save(rewritten(model=with_extra), folder)
    assert not list(folder.parent.iterdir())


# Where it goes.


def test_replaces_an_earlier_checkpoint(folder: Path) -> None:
    folder.mkdir()
    resfx.save(rewritten(), folder, max_shard_bytes=600)
    saved = rewritten()
    resfx.save(saved, folder)
    assert {file.name for file in folder.iterdir()} == {"model.safetensors", "constants.safetensors", "resfx.json"}
    assert_same(resfx.load(tied(1), folder, (TOKENS,)), saved)
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]


def test_failing_write_leaves_the_earlier_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = rewritten()
    resfx.save(saved, folder)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint_files, "save_file", full)
    with pytest.raises(resfx.CheckpointPathError, match=r"model.safetensors can't be written: .*No space left"):
        resfx.save(rewritten(), folder)
    monkeypatch.undo()
    assert [file.name for file in folder.parent.iterdir()] == [folder.name]
    assert_same(resfx.load(tied(1), folder, (TOKENS,)), saved)


def test_paths(tmp_path: Path) -> None:
    model = rewritten()
    with pytest.raises(resfx.CheckpointPathError, match=r"nowhere does not exist: create it first"):
        resfx.save(model, tmp_path / "nowhere" / "checkpoint")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(resfx.CheckpointPathError, match="file is no folder"):
        resfx.save(model, tmp_path / "file")
    with pytest.raises(resfx.CheckpointPathError, match="file is a file, not a folder"):
        resfx.save(model, tmp_path / "file" / "checkpoint")
    with pytest.raises(resfx.CheckpointPathError, match="holds file, which is no part of a checkpoint"):
        resfx.save(model, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    assert issubclass(resfx.CheckpointPathError, OSError)
