"""The files of a checkpoint: safetensors, in shards where they grow large, in a folder that appears whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from resfx.patterns.errors import ResfxError

_OURS = re.compile(r"resfx\.json|(model|constants)(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class CheckpointError(ResfxError):
    """A checkpoint can't be written or read, or doesn't belong to the model."""


class CheckpointPathError(CheckpointError, OSError):
    """The folder can't be written or read: no such parent, a file, no permission, somebody else's files."""


@contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on success it takes the place of `path`, at once.

    An earlier checkpoint at `path` is replaced; a folder with any other file is refused. Nothing is left behind where
    the body raises. Errors: CheckpointPathError.
    """
    target = _checked_target(path)
    try:
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise CheckpointPathError(f"nothing can be written to {target.parent}: {error}") from error
    try:
        fresh = stage / "new"
        fresh.mkdir()  # mkdtemp's own folder is closed to other users
        yield fresh
        _put_in_place(fresh, target, stage / "old")
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _checked_target(path: str | os.PathLike[str]) -> Path:
    target = Path(os.path.abspath(os.path.expanduser(path)))
    parent = target.parent
    if not parent.exists():
        raise CheckpointPathError(f"the folder {parent} does not exist: create it first")
    if not parent.is_dir():
        raise CheckpointPathError(f"{parent} is a file, not a folder: choose another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointPathError(f"the folder {parent} can't be written: change its permissions or choose another")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise CheckpointPathError(f"{target} is no folder: name the folder to write, it may be a new one")
    if not target.exists():
        return target
    foreign = next((name for name in sorted(os.listdir(target)) if not _OURS.fullmatch(name)), None)
    if foreign is not None:
        raise CheckpointPathError(
            f"the folder {target} holds {foreign}, which is no part of a checkpoint and would be lost: "
            "choose a folder of its own, new or empty"
        )
    return target


def _put_in_place(fresh: Path, target: Path, aside: Path) -> None:
    try:
        if not target.exists():
            os.rename(fresh, target)
            return
        os.rename(target, aside)
        try:
            os.rename(fresh, target)
        except OSError:
            os.rename(aside, target)
            raise
    except OSError as error:
        raise CheckpointPathError(f"{target} could not be put in place: {error}") from error


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_json(file: Path) -> Any:
    """Errors: CheckpointPathError where there is no such file, CheckpointError where it is no JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointPathError(
            f"{file} can't be read ({error.strerror}): name a folder that resfx.save has written"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged ({error}): save the checkpoint again") from error


def write_tensors(folder: Path, stem: str, tensors: Mapping[str, torch.Tensor], limit: int) -> None:
    """Write `<stem>.safetensors`, or shards of at most `limit` bytes and their index (a larger tensor is alone in its shard).

    Errors: CheckpointError naming the tensor that can't be stored, CheckpointPathError for a full disk and the like.
    """
    shards = _sharded(tensors, limit)
    names = [f"{stem}.safetensors"]
    if len(shards) > 1:
        names = [f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
        index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        total = sum(_bytes(tensor) for tensor in tensors.values())
        write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    for file, shard in zip(names, shards, strict=True):
        _write(folder / file, {name: tensors[name] for name in shard})


def _sharded(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    used = 0
    for name, tensor in tensors.items():
        size = _bytes(tensor)
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    # A copy of each: the format wants them contiguous and none on another's memory.
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    try:
        save_file(plain, file, metadata={"format": "pt"})
    except OSError as error:
        raise CheckpointPathError(f"{file.name} can't be written: {error}") from error
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        kinds = ", ".join(sorted({str(tensor.dtype) for tensor in tensors.values()}))
        raise CheckpointError(f"{file.name} can't be written ({error}); the tensors' dtypes are {kinds}") from error


@dataclass
class TensorFiles:
    """The tensors of one checkpoint by name, read when asked for."""

    _files: dict[str, Path] = field(default_factory=dict)
    _open: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, stem: str) -> TensorFiles:
        """`<stem>.safetensors` or the shards of its index. Errors: CheckpointPathError, CheckpointError for damaged files."""
        index = folder / f"{stem}.safetensors.index.json"
        found = cls()
        if not index.exists():
            found._add(folder / f"{stem}.safetensors", None)
            return found
        listed = _weight_map(index)
        for file in sorted(set(listed.values())):
            found._add(folder / file, [name for name, where in listed.items() if where == file])
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._files[name]].get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        """The tensor, on the CPU."""
        tensor = self._open[self._files[name]].get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def dtype(self, name: str) -> torch.dtype:
        """Its dtype, without reading its numbers where it has an axis to slice."""
        part = self._open[self._files[name]].get_slice(name)
        return self.get(name).dtype if not self.shape(name) else torch.as_tensor(part[:0]).dtype

    def _add(self, file: Path, names: Iterable[str] | None) -> None:
        if not file.exists():
            raise CheckpointPathError(f"{file} is missing: the checkpoint is incomplete, copy or save it again")
        try:
            self._open[file] = safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged ({error}): copy or save the checkpoint again") from error
        held = set(self._open[file].keys())
        lost = sorted(set(names or ()) - held)
        if lost:
            raise CheckpointError(
                f"{file} lacks {', '.join(lost[:5])}, which its index lists: save the checkpoint again"
            )
        self._files.update(dict.fromkeys(sorted(held) if names is None else names, file))


def _weight_map(index: Path) -> dict[str, str]:
    content = read_json(index)
    listed = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(listed, dict) or not all(isinstance(f, str) and Path(f).name == f for f in listed.values()):
        raise CheckpointError(
            f"{index} is damaged (no map of tensors to files in this folder): save the checkpoint again"
        )
    return listed
