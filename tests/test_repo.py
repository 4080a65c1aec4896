"""The house rules that no linter knows: who imports whom, how long a file may be, what every form brings."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from resfx.passes import FORMS

ROOT = Path(__file__).parent.parent
IMPORT_NAMES = {
    "rewriter": "resfx",
    "passes": "resfx.passes",
    "patterns": "resfx.patterns",
    "export": "resfx.export",
}
# DESIGN's arrows. `resfx.patterns.errors`, the common base of all errors, is open to every folder.
MAY_IMPORT = {
    "rewriter": {"rewriter", "passes", "patterns", "export"},
    "passes": {"passes", "patterns"},
    "patterns": {"patterns"},
    "export": {"export"},
}
COMMON = "resfx.patterns.errors"
FILES = [path for folder in IMPORT_NAMES for path in sorted((ROOT / folder).rglob("*.py"))]
OURS = FILES + sorted(
    path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py") if "cases" not in path.parts
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported(path: Path) -> Iterator[str]:
    """Every module that the file imports, function bodies included; a `from a import b` also as a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def folder_of(module: str) -> str | None:
    """The folder that a module of ours lives in."""
    for folder in ("passes", "patterns", "export"):
        if module == IMPORT_NAMES[folder] or module.startswith(IMPORT_NAMES[folder] + "."):
            return folder
    return "rewriter" if module.split(".")[0] == "resfx" else None


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_arrows_go_down_only(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    wrong = [
        module
        for module in imported(path)
        if folder_of(module) not in MAY_IMPORT[folder] | {None} and not module.startswith(COMMON)
    ]
    assert not wrong, f"{folder}/ may not import {wrong}"


def test_the_arrow_check_sees_a_wrong_arrow(tmp_path: Path) -> None:
    path = tmp_path / "wrong.py"
    path.write_text("import resfx.export\ndef f():\n    from resfx import passes\n    from resfx.capture import x\n")
    assert [folder_of(module) for module in imported(path)] == ["export", "passes", "rewriter"]


@pytest.mark.parametrize("folder", sorted(set(IMPORT_NAMES) - {"rewriter"}))
def test_no_import_of_a_bare_folder(folder: str) -> None:
    """`import passes` would work from the root of a checkout, and nowhere else."""
    wrong = [relative(path) for path in OURS for module in imported(path) if module.split(".")[0] == folder]
    assert not wrong


@pytest.mark.parametrize("path", OURS, ids=relative)
def test_file_length(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_every_file_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree)


def test_every_folder_is_packaged_and_typed() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {setup["package-dir"][name]: name for name in setup["packages"]} == IMPORT_NAMES
    assert all((ROOT / folder / "py.typed").is_file() for folder in IMPORT_NAMES)
    subpackages = [path for folder in IMPORT_NAMES for path in (ROOT / folder).rglob("*/__init__.py")]
    assert not subpackages, "list a new subpackage in pyproject.toml, then here"


def test_ci_pins_what_it_runs() -> None:
    """Every direct dependency and tool has one exact version in constraints.txt, inside pyproject's range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [Requirement(line) for line in [*project["dependencies"], *(line for extra in extras for line in extra)]]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert sorted(pinned) == sorted({requirement.name for requirement in wanted})
    assert [r.name for r in wanted if not r.specifier.contains(pinned[r.name])] == []


def test_every_form_is_registered_documented_and_tested() -> None:
    classes = {
        node.name
        for path in (ROOT / "passes").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base) == "Form" for base in node.bases)
    }
    assert {form.__name__ for form in FORMS.values()} == classes
    readme = (ROOT / "README.md").read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "passes").glob("test_*.py"))
    for name, form in FORMS.items():
        assert form.name == name
        assert form.__doc__
        assert f"| `{form.__name__}(" in readme, "one row in the README's table of forms"
        assert re.search(rf"\b{form.__name__}\b", tests), "a test"


def test_test_files_have_names_of_their_own() -> None:
    """pytest imports a test file by its base name: two of one name in different folders collide."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert len(names) == len(set(names))
