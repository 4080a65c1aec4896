"""MODEL: where a model may come from, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from resfx.cli_inputs import UsageError
from resfx.cli_models import load_model

USER = """
from torch import nn, randn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, flag=True):
        return x + self.linear(x)

class Needy(nn.Module):
    def __init__(self, width):
        super().__init__()

def alone(): return Net()
def with_args(): return Net(), (randn(2, 8),)
def with_kwargs(): return Net(), [randn(2, 8)], {"flag": False}
def number(): return 3
def swapped(): return Net(), {"x": 1}
def broken(): raise ValueError("boom")

net = Net()
three = 3
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    path = tmp_path / "user_model.py"
    path.write_text(USER)
    return path


def test_a_file_alone_lists_what_it_has(user: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load_model(str(user))
    names = ("Net", "alone", "with_args", "with_kwargs", "number", "swapped", "broken", "net")
    assert str(caught.value).endswith("Try: " + ", ".join(f"{user}:{name}" for name in names))
    (tmp_path / "empty.py").write_text("from torch import nn\nfrom torch.nn import Linear\n")
    with pytest.raises(UsageError, match="has no model: write a function"):
        load_model(str(tmp_path / "empty.py"))


@pytest.mark.parametrize("name", ["alone", "Net", "net"])
def test_functions_classes_and_modules(user: Path, name: str) -> None:
    model, known = load_model(f"{user}:{name}")
    assert type(model).__name__ == "Net"
    assert known is None


def test_functions_that_bring_inputs(user: Path) -> None:
    _, known = load_model(f"{user}:with_args")
    assert known is not None
    assert known[0][0].shape == (2, 8)
    assert known[1] == {}
    _, known = load_model(f"{user}:with_kwargs")
    assert known is not None
    assert isinstance(known[0], tuple)
    assert known[1] == {"flag": False}


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Needy", "needs arguments \\(width\\)"),
        ("number", "returned int"),
        ("swapped", "args is no tuple"),
        ("broken", "ValueError: boom.*user_model.py:21"),
        ("three", "of type int"),
        ("with_arg", "Nearest: with_args"),
    ],
)
def test_refused_in_a_file(user: Path, name: str, reason: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){reason}"):
        load_model(f"{user}:{name}")


@pytest.mark.parametrize("text", ["import nothing_of_the_kind", "def f(:", "1 / 0"])
def test_a_file_that_cannot_be_imported(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.py").write_text(text)
    with pytest.raises(UsageError, match=r"(?s)can't be imported.*bad.py:1"):
        load_model(f"{tmp_path / 'bad.py'}:f")


def test_a_module_here(user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(user.parent)
    monkeypatch.setattr("sys.path", ["somewhere/else"])
    with pytest.raises(UsageError, match="There is no module 'user_modell'"):
        load_model("user_modell:alone")
    assert isinstance(load_model("user_model:alone")[0], nn.Module)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("nothing", "no such file or folder"),
        ("nothing.pt2", "no file nothing.pt2"),
        ("nothing.py:f", "no file nothing.py"),
        (":f", "no such file"),
        ("torchvision:resnet19", "Nearest: resnet18"),
        ("timm:vit_tiny_patch16_22", "Nearest: vit_tiny_patch16_224"),
    ],
)
def test_refused(spec: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        load_model(spec)


def test_libraries() -> None:
    model, known = load_model("torchvision:resnet18")
    assert type(model).__name__ == "ResNet"
    assert not model.training
    assert known is None
    assert type(load_model("timm:vit_tiny_patch16_224")[0]).__name__ == "VisionTransformer"


def test_a_detector_downloads_no_backbone() -> None:
    assert type(load_model("torchvision:ssdlite320_mobilenet_v3_large")[0]).__name__ == "SSD"


def config(folder: Path, **changes: object) -> Path:
    base = {"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 60}
    special = {"bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps({**base, **special, **changes}))
    return folder


def test_a_config_folder_without_weights(tmp_path: Path) -> None:
    model, known = load_model(str(config(tmp_path, architectures=["GPT2LMHeadModel"])))
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert known is None
    assert type(load_model(str(config(tmp_path)))[0]).__name__ == "GPT2Model"


def test_a_config_folder_with_weights(tmp_path: Path) -> None:
    model, _ = load_model(str(config(tmp_path, architectures=["GPT2LMHeadModel"])))
    model.save_pretrained(tmp_path)
    again, _ = load_model(str(tmp_path))
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)


def test_config_folders_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no config\.json"):
        load_model(str(tmp_path))
    with pytest.raises(UsageError, match="NothingModel"):
        load_model(str(config(tmp_path, architectures=["NothingModel"])))
    with pytest.raises(UsageError, match="transformers can't build"):
        load_model(str(config(tmp_path, model_type="nothing")))


def test_a_saved_program(tmp_path: Path) -> None:
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    path = tmp_path / "linear.pt2"
    torch.export.save(torch.export.export(linear, (x,)), path)
    model, known = load_model(str(path))
    assert known is not None
    assert torch.equal(model.train().eval()(*known[0]), linear(x))
    (tmp_path / "other.pt2").write_bytes(b"nothing")
    with pytest.raises(UsageError, match=r"no program that torch\.export\.save wrote"):
        load_model(str(tmp_path / "other.pt2"))
