"""26 small models that are hard to read: the search finds exactly the marked lines, as often as they are marked."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import resfx

FOLDER = Path(__file__).parent.parent / "cases"
FILES = sorted(FOLDER.glob("case*.py"))
MARK = re.compile(r"# SITE x(\d+)")


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def exports(path: Path) -> bool:
    """What the file's flag says, read without running it."""
    return not re.search(r"^SITES,.*\bEXPORTS\b.*\bFalse$", path.read_text(), re.MULTILINE)


def marked_sites(path: Path) -> Counter[str]:
    """`file:line` -> sites, from the marks."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return Counter({f"{path}:{number}": int(mark[1]) for number, line in lines if (mark := MARK.search(line))})


def find(module: ModuleType) -> resfx.ResidualMap:
    args = module.inputs() if hasattr(module, "inputs") else ()
    kwargs = module.kwargs() if hasattr(module, "kwargs") else {}
    model = module.make()
    model.train(getattr(module, "TRAIN", False))
    return resfx.find(model, args, kwargs, frontend="export")


def test_all_files_are_here() -> None:
    assert len(FILES) == 26
    assert sum(not exports(path) for path in FILES) == 1


@pytest.mark.parametrize("path", [p for p in FILES if exports(p)], ids=lambda p: p.stem)
def test_sites_are_the_marked_lines(path: Path) -> None:
    module = load(path)
    assert getattr(module, "EXPORTS", True)
    found = find(module)
    assert Counter(site.source for site in found.sites) == marked_sites(path)
    assert len(found.sites) == module.SITES
    assert len(found.streams) == module.STREAMS


@pytest.mark.parametrize("path", [p for p in FILES if not exports(p)], ids=lambda p: p.stem)
def test_what_cannot_be_captured_is_an_error_that_names_the_line(path: Path) -> None:
    module = load(path)
    assert module.EXPORTS is False
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if text.lstrip().startswith("if x."))
    with pytest.raises(resfx.CaptureError, match=re.escape(f"{path.name}:{line}")):
        find(module)
