"""compile and the AOTInductor package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from export_models import Block, BranchOnData, Result, Structured
from torch import Tensor, nn

import resfx.export
from resfx.export import (
    AotiError,
    CompileError,
    InputError,
    OutputMismatchError,
    OutputPathError,
    TraceError,
    load_aoti,
    to_aoti,
)
from resfx.export import aoti as aoti_module


def test_compile_forward_and_backward() -> None:
    torch.manual_seed(0)
    model, x = Block().eval(), torch.randn(3, 8)
    compiled = resfx.export.compile(model, backend="aot_eager")
    expected, got = model(x), compiled(x)
    torch.testing.assert_close(got, expected)
    wanted = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), list(model.parameters())), wanted)


def test_compile_names_the_graph_break() -> None:
    model = nn.Sequential(nn.ReLU(), BranchOnData())
    with pytest.raises(CompileError, match=r"export_models.py:\d+.*Data-dependent branching") as caught:
        resfx.export.compile(model, backend="eager")(torch.randn(3))
    assert caught.value.__cause__ is not None
    x = -torch.ones(3)
    torch.testing.assert_close(resfx.export.compile(model, backend="eager", fullgraph=False)(x), model(x))


def test_compile_refuses_bad_options_at_once() -> None:
    with pytest.raises(CompileError, match="nope"):
        resfx.export.compile(Block(), backend="nope")
    with pytest.raises(CompileError, match="not both"):
        resfx.export.compile(Block(), mode="default", options={})


def test_compile_shows_the_backend_error() -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    with pytest.raises(CompileError, match="boom"):
        resfx.export.compile(Block(), backend=broken)(torch.randn(3, 8))


def test_an_error_of_the_running_model_passes_through() -> None:
    class Raises(nn.Module):
        @torch.compiler.disable
        def check(self, x: Tensor) -> Tensor:
            raise KeyError("mine")

        def forward(self, x: Tensor) -> Tensor:
            return self.check(x)

    with pytest.raises(KeyError, match="mine"):
        resfx.export.compile(Raises(), backend="eager", fullgraph=False)(torch.randn(3))


def test_aoti_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compilation serves three questions: the numbers, the signature, and that a wrong package is noticed."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(1, 8)
    report = to_aoti(model, tmp_path / "m.pt2", (x,))
    assert list(report.checks) == ["batch 1", "batch 2"]
    assert report.max_difference is not None
    assert report.max_difference < 1e-5
    assert "batch 2: relative norm" in str(report)
    assert model.training
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt2"]
    more = torch.randn(5, 8)
    loaded = load_aoti(report.path)
    torch.testing.assert_close(loaded(more), model.eval()(more))
    with pytest.raises(InputError, match=r"`x`, axis 1: size 7"):
        loaded(torch.randn(5, 7))
    with pytest.raises(InputError, match=r"`x` has the strides"):
        loaded(torch.randn(8, 5).t())

    other = Block()
    package = report.path.read_bytes()
    monkeypatch.setattr(aoti_module, "_compile", lambda model, program, file, configs: file.write_bytes(package))
    with pytest.raises(OutputMismatchError, match="AOTInductor package"):
        to_aoti(other, tmp_path / "wrong.pt2", (x,))
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt2"]


def test_aoti_bad_input(tmp_path: Path) -> None:
    x = torch.randn(3, 8)
    with pytest.raises(OutputPathError, match=r"must end in .pt2"):
        to_aoti(Block(), tmp_path / "m.onnx", (x,))
    with pytest.raises(TraceError, match=r"export_models.py:\d+"):
        to_aoti(BranchOnData(), tmp_path / "m.pt2", (x,))
    with pytest.raises(OutputPathError, match="no file"):
        load_aoti(tmp_path / "missing.pt2")
    (tmp_path / "junk.pt2").write_text("junk")
    with pytest.raises(AotiError, match="no AOTInductor package"):
        load_aoti(tmp_path / "junk.pt2")


@pytest.mark.slow
def test_aoti_keeps_signature_and_output_type(tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.export.register_dataclass(Result, serialized_type_name="export_models.Result")
    model, x = Structured(), torch.randn(3, 8)
    kwargs = {"extra": {"shifts": [torch.zeros(3, 8)]}, "times": 2}
    report = to_aoti(model, tmp_path / "m.pt2", (x,), kwargs)
    assert list(report.checks) == ["batch 3", "batch 4"]
    result = load_aoti(report.path)(x, extra={"shifts": [torch.zeros(3, 8)]}, times=2)
    assert isinstance(result, Result)
    assert int(result.steps) == 2
    torch.testing.assert_close(result.states, model.linear(x) * 2 + 1)


@pytest.mark.slow
def test_a_package_that_does_not_say_what_it_takes(tmp_path: Path) -> None:
    """torch's own packager writes none of it."""
    program = torch.export.export(nn.Linear(2, 2), (torch.randn(3, 2),))
    torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
    with pytest.raises(AotiError, match="not written by to_aoti"):
        load_aoti(tmp_path / "m.pt2")
