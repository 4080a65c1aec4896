"""Mistakes of a first evening: each is an error that says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from torch import nn

import resfx
from resfx.cli_models import UsageError, load_model

X = torch.randn(1, 5, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, img: torch.Tensor) -> torch.Tensor:
        return img + self.linear(img)

    def prepare_inputs(self) -> None:
        """A method of its own."""


class TwoBranches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


def attached() -> nn.Sequential:
    model = nn.Sequential(Block(), Block())
    resfx.attach(model, resfx.Review(), (X,), backend="eager")
    return model


MISTAKES: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "measure takes a tuple": (lambda: resfx.measure(Block(), X), ("write (x,) for one argument",)),
    "a misspelled keyword": (
        lambda: resfx.rewrite(Block(), resfx.Review(), (), {"image": X}),
        ("Block.forward has no argument 'image'; its arguments are img",),
    ),
    "a form as text": (lambda: resfx.rewrite(Block(), "review", (X,)), ("resfx.DeltaAttention()", "command line")),
    "a near miss": (
        lambda: resfx.rewrite(nn.Sequential(TwoBranches()), resfx.Review(), (X,)),
        ("1 sum came near: module `0`", "test_beginner_errors.py:", "explain(PATH)"),
    ),
    "no such stream": (lambda: resfx.rewrite(Block(), resfx.Review(), (X,), streams=3), ("the model has stream 0 alone",)),
    "a search of an attached model": (lambda: resfx.find(attached(), (X,)), ("resfx.detach it before a search",)),
    "an attached model on another width": (
        lambda: attached()(X[..., :7]),
        ("the model itself fails on this call in module `0.linear`", "test_beginner_errors.py:", "shapes"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_what_to_write(name: str) -> None:
    mistake, texts = MISTAKES[name]
    with pytest.raises(resfx.ResfxError) as caught:
        mistake()
    assert all(text in str(caught.value) for text in texts), str(caught.value)


def test_load_takes_a_tuple(tmp_path: Path) -> None:
    resfx.save(resfx.rewrite(Block(), resfx.Review(), (X,)), tmp_path / "saved")
    with pytest.raises(resfx.ResfxError, match=r"write \(x,\) for one argument"):
        resfx.load(Block(), tmp_path / "saved", X)


def test_an_attached_model_goes_on_after_a_call_that_failed() -> None:
    model = attached()
    expected = model(X)
    with pytest.raises(resfx.ResfxError):
        model(X[..., :7])
    assert torch.equal(model(X), expected)


def test_a_method_of_the_models_own_class() -> None:
    better = resfx.rewrite(Block(), resfx.Review(), (X,))
    with pytest.raises(AttributeError, match=r"it is Block's own.*resfx\.attach"):
        _ = better.prepare_inputs
    with pytest.raises(AttributeError, match="'Rewritten' object has no attribute 'other'"):
        _ = better.other


def test_a_package_of_aotinductor_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    with ZipFile(path, "w") as archive:
        archive.writestr("model/data/aotinductor/model/x.so", b"")
    with pytest.raises(UsageError, match="load_aoti runs it"):
        load_model(str(path))
