"""Output files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from resfx.export.errors import OutputPathError


def checked_path(path: str | os.PathLike[str], *, suffix: str | None = None) -> Path:
    """The absolute path to write, after every check that needs no export.

    Raises OutputPathError where the parent is missing, the path or its parent is of the wrong kind, the folder cannot
    be written, or the name lacks the `suffix` that the format demands.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise OutputPathError(f"the path to write is a {type(path).__name__}: name a file")
    target = Path(os.path.abspath(os.path.expanduser(path)))
    if target.is_dir():
        raise OutputPathError(
            f"{target} is a folder: name the file to write, for example {target / 'model'}{suffix or ''}"
        )
    if suffix is not None and target.suffix != suffix:
        raise OutputPathError(f"{target} must end in {suffix}: write {target.with_suffix(suffix)}")
    if not target.parent.exists():
        raise OutputPathError(f"the folder {target.parent} does not exist: create it first")
    if not target.parent.is_dir():
        raise OutputPathError(f"{target.parent} is a file, not a folder: choose another path")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputPathError(f"the folder {target.parent} cannot be written: change its permissions or choose another")
    return target


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Yield a path of the same file name in a temporary folder beside `target`; move its files in place on success.

    The folder is on the same file system, so each move is atomic. Files beside the main one (external data) move
    first: a reader that sees the main file finds them. Nothing is left behind where the body raises.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise OutputPathError(f"no file can be written to {target.parent}: {error}") from error
    try:
        yield folder / target.name
        _move(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(folder: Path, target: Path) -> None:
    files = sorted(folder.iterdir(), key=lambda file: file.name == target.name)
    try:
        for file in files:
            os.replace(file, target.parent / file.name)
    except OSError as error:
        raise OutputPathError(f"{target} could not be put in place: {error}") from error
