"""Checkpoints that do not fit, are damaged, or have nowhere to go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import TOKENS, Tied, assert_same, rewritten, tied
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import resfx
from resfx import checkpoint_files

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
