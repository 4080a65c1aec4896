"""to_onnx: inputs, outputs, sizes, weights, errors. The files are read back with onnx and ONNX Runtime here too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from export_models import BiasedAttention, Block, BranchOnData, FixedBatch, OneRowIsSpecial, Structured, TinyGPT
from onnxscript import opset20 as op
from torch import Tensor, nn
from torch.export import Dim

import resfx.export.onnx_graph as onnx_graph
from resfx.export import (
    DynamicDimError,
    InputError,
    NotAModuleError,
    OnnxExportError,
    OnnxRunError,
    OutputError,
    OutputMismatchError,
    TraceError,
    UnsupportedDtypeError,
    to_onnx,
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def shapes(ports: tuple[object, ...]) -> dict[str, tuple[int | str, ...]]:
    return {port.name: port.shape for port in ports}  # type: ignore[attr-defined]


def run(path: Path, **feed: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feed)


def test_mlp(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(3, 8)
    report = to_onnx(model, tmp_path / "m.onnx", (x,))
    assert [(c.batch, c.optimisations) for c in report.checks] == [
        ("batch 3", "off"), ("batch 4", "off"), ("batch 3", "on"), ("batch 4", "on")
    ]  # fmt: skip
    assert report.max_difference is not None
    assert report.max_difference < 1e-5
    assert report.inputs[0].dynamic == (0,)
    assert report.bytes == report.path.stat().st_size
    assert "batch 4, optimisations on" in str(report)
    more = torch.randn(7, 8)
    (got,) = run(report.path, x=more.numpy())
    np.testing.assert_allclose(got, model.eval()(more).detach(), atol=1e-5)
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def test_batch_of_one_stays_open(tmp_path: Path) -> None:
    report = to_onnx(Block(), tmp_path / "m.onnx", (torch.randn(1, 8),))
    assert shapes(report.inputs) == {"x": ("batch", 8)}
    assert {c.batch for c in report.checks} == {"batch 1", "batch 2"}


def test_batch_of_one_that_is_special_is_captured_as_it_is(tmp_path: Path) -> None:
    report = to_onnx(OneRowIsSpecial(), tmp_path / "m.onnx", (torch.ones(1, 3),))
    assert report.inputs[0].shape[0] == 1
    assert any("batch of 1 is fixed" in note for note in report.notes)
    np.testing.assert_array_equal(run(report.path, x=np.ones((1, 3), np.float32))[0], 3.0)


def test_gpt_with_tied_head_and_open_sequence(tmp_path: Path) -> None:
    model, tokens = TinyGPT(), torch.randint(0, 1000, (2, 5))
    report = to_onnx(model, tmp_path / "m.onnx", (tokens,), {"labels": tokens})
    assert report.inputs[0].shape == ("batch", "tokens_dim1")
    assert shapes(report.outputs)["output_1"] == ()
    weights = [w.name for w in onnx.load(report.path).graph.initializer if 1000 in w.dims]
    assert len(weights) == 1
    assert weights[0] in model.state_dict()
    longer = torch.randint(0, 1000, (3, 9))
    logits, loss = run(report.path, tokens=longer.numpy(), labels=longer.numpy())
    expected = model.eval()(longer, longer)
    np.testing.assert_allclose(logits, expected[0].detach(), atol=1e-5)
    np.testing.assert_allclose(loss, expected[1].detach(), atol=1e-5)


def test_nested_inputs_and_dataclass_output(tmp_path: Path) -> None:
    model, x, shift = Structured(), torch.randn(3, 8), torch.zeros(3, 8)
    kwargs = {"extra": {"shifts": [shift]}, "mask": None, "double": True, "times": 3}
    report = to_onnx(model, tmp_path / "m.onnx", (x,), kwargs)
    assert list(shapes(report.inputs)) == ["x", "extra_shifts_0"]
    assert list(shapes(report.outputs)) == ["states", "pair_0", "pair_1"]
    assert any("steps (int)" in note for note in report.notes)
    states, same, again = run(report.path, x=x.numpy(), extra_shifts_0=shift.numpy())
    np.testing.assert_allclose(states, ((model.linear(x) * 3 + 1) * 2).detach(), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(same, x)
    np.testing.assert_array_equal(again, states)
    assert float(model.steps) == 0, "the export left its step counter changed"
    assert float(shift.abs().sum()) == 0, "the export changed an example input"


def test_an_output_that_is_an_input_gets_a_name_of_its_own(tmp_path: Path) -> None:
    kwargs = {"extra": {"shifts": [torch.zeros(3, 8)]}, "mask": torch.ones(3, 8)}
    report = to_onnx(Structured(), tmp_path / "m.onnx", (torch.randn(3, 8),), kwargs)
    assert set(shapes(report.outputs)) == {"states", "cache", "pair_0", "pair_1"}

    class Echo(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"x": x}

    report = to_onnx(Echo(), tmp_path / "e.onnx", (torch.randn(3, 8),))
    assert list(shapes(report.outputs)) == ["x_out"]


def test_flags_are_restored_one_by_one(tmp_path: Path) -> None:
    model = nn.Sequential(Block(), Block())
    model[0].drop.eval()
    before = {name: module.training for name, module in model.named_modules()}
    to_onnx(model, tmp_path / "m.onnx", (torch.randn(3, 8),))
    assert {name: module.training for name, module in model.named_modules()} == before


def test_fixed_batch_is_reported(tmp_path: Path) -> None:
    report = to_onnx(FixedBatch(), tmp_path / "m.onnx", (torch.randn(4, 3),))
    assert {c.batch for c in report.checks} == {"batch 4"}
    assert any("the batch is fixed at 4" in note for note in report.notes)


def test_names_of_asked_dims(tmp_path: Path) -> None:
    spec = {"x": {0: Dim("rows", max=64)}}
    report = to_onnx(Block(), tmp_path / "m.onnx", (torch.randn(3, 8),), dynamic_shapes=spec)
    assert shapes(report.inputs) == {"x": ("rows", 8)}


def test_asked_dim_that_is_fixed_names_the_place(tmp_path: Path) -> None:
    model = nn.Sequential(nn.ReLU(), FixedBatch())
    with pytest.raises(DynamicDimError, match=r"input dim 0 is 4 in module '1' \(.*export_models.py:\d+\)"):
        to_onnx(model, tmp_path / "m.onnx", (torch.randn(4, 3),), dynamic_shapes=({0: Dim.DYNAMIC},))
    with pytest.raises(DynamicDimError, match="names nothing: the arguments are input"):
        to_onnx(model, tmp_path / "m.onnx", (torch.randn(4, 3),), dynamic_shapes={"nothing": None})
    assert not list(tmp_path.iterdir())


def test_external_data_stands_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_graph, "INLINE_LIMIT", 1000)
    report = to_onnx(Block(64), tmp_path / "big.onnx", (torch.randn(3, 64),))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["big.onnx", "big.onnx.data"]
    assert report.bytes == sum(file.stat().st_size for file in tmp_path.iterdir())
    assert run(report.path, x=np.ones((2, 64), np.float32))[0].shape == (2, 64)


def test_opset(tmp_path: Path) -> None:
    assert to_onnx(Block(), tmp_path / "m.onnx", (torch.randn(3, 8),), opset=18).opset == 18
    with pytest.raises(OnnxExportError, match=r"convert the model to 7: ask for one from 18 to \d+"):
        to_onnx(Block(), tmp_path / "n.onnx", (torch.randn(3, 8),), opset=7)
    assert not (tmp_path / "n.onnx").exists()


@torch.library.custom_op("resfx_test::plus_one", mutates_args=())
def plus_one(x: Tensor) -> Tensor:
    return x + 1


plus_one.register_fake(torch.empty_like)


class UsesPlusOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return plus_one(x) * 2


def test_an_op_without_translation_is_named_and_can_be_given(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(3, 3), UsesPlusOne()), torch.randn(4, 3)
    with pytest.raises(
        OnnxExportError, match=r"torch.export passed.*resfx_test.plus_one.default in module '1' \(.*\.py"
    ):
        to_onnx(model, tmp_path / "m.onnx", (x,))
    key = torch.ops.resfx_test.plus_one.default
    to_onnx(model, tmp_path / "m.onnx", (x,), functions={key: lambda x: op.Add(x, op.CastLike(1.0, x))})
    with pytest.raises(OutputMismatchError, match=r"'output' .* optimisations off, batch 4") as caught:
        to_onnx(model, tmp_path / "wrong.onnx", (x,), functions={key: lambda x: op.Add(x, op.CastLike(1.001, x))})
    assert caught.value.output == "output"
    assert len(caught.value.index) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["m.onnx"]


def test_a_graph_that_is_wrong_at_another_batch_is_found(tmp_path: Path) -> None:
    """The other batch size is really run: a translation that hard-codes the example's four rows fails there only."""
    key = torch.ops.resfx_test.plus_one.default

    def four_rows(x: object) -> object:
        return op.Add(x, op.Constant(value=onnx.numpy_helper.from_array(np.ones((4, 3), np.float32))))

    with pytest.raises(OnnxRunError, match="batch 5"):
        to_onnx(UsesPlusOne(), tmp_path / "m.onnx", (torch.randn(4, 3),), functions={key: four_rows})


def test_an_invalid_file_is_refused_by_the_checker(tmp_path: Path) -> None:
    path = to_onnx(Block(), tmp_path / "m.onnx", (torch.randn(3, 8),)).path
    broken = onnx.load(path)
    broken.graph.node[-1].input[0] = "nowhere"
    onnx.save(broken, path)
    with pytest.raises(OnnxRunError, match="nowhere"):
        onnx_graph.check_file(path)


def test_bfloat16_is_refused_before_the_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(3, 3).bfloat16(), torch.randn(4, 3, dtype=torch.bfloat16)
    report = to_onnx(model, tmp_path / "unchecked.onnx", (x,), check=False)
    assert report.inputs[0].dtype == "bfloat16"
    assert report.max_difference is None
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: pytest.fail("the export was started"))
    with pytest.raises(UnsupportedDtypeError, match=r"parameter weight is bfloat16.*float\(\)"):
        to_onnx(model, tmp_path / "m.onnx", (x,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_float_types(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.ReLU()).to(dtype)
    report = to_onnx(model, tmp_path / "m.onnx", (torch.randn(4, 32, dtype=dtype),))
    assert report.inputs[0].dtype == {torch.float16: "float16", torch.float64: "double"}[dtype]
    assert len(report.checks) == 4


def test_what_onnx_runtime_lacks_is_named(tmp_path: Path) -> None:
    """Its CPU provider has no float64 erf."""
    with pytest.raises(OnnxRunError, match=r"Erf(?s:.*)check=False"):
        to_onnx(nn.GELU().double(), tmp_path / "m.onnx", (torch.randn(4, 3, dtype=torch.float64),))
    assert not list(tmp_path.iterdir())


def test_attention_with_bias(tmp_path: Path) -> None:
    """The exporter's passes give it other strides than the trace did: the graph must not depend on strides."""
    report = to_onnx(BiasedAttention(), tmp_path / "m.onnx", (torch.randn(2, 5, 8),))
    assert report.inputs[0].shape == ("batch", "x_dim1", 8)


def test_bad_input(tmp_path: Path) -> None:
    model, x, path = nn.Sequential(nn.Linear(3, 3)), torch.randn(4, 3), tmp_path / "m.onnx"
    with pytest.raises(NotAModuleError, match="call it"):
        to_onnx(nn.Linear, path, (x,))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"write \(x,\)"):
        to_onnx(model, path, x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="missing a required argument: 'input'"):
        to_onnx(model, path)
    with pytest.raises(InputError, match="argument input is a object"):
        to_onnx(model, path, (object(),))
    with pytest.raises(InputError, match=r"fails on the example arguments in module '0'.*4x5"):
        to_onnx(model, path, (torch.randn(4, 5),))
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_exported(tmp_path: Path) -> None:
    class NoTensor(nn.Module):
        def forward(self, x: Tensor) -> int:
            return 3

    path, x = tmp_path / "m.onnx", torch.randn(4, 3)
    with pytest.raises(OutputError, match="int"):
        to_onnx(NoTensor(), path, (x,))
    with pytest.raises(TraceError, match=r"in module '1.0' \(.*export_models.py:\d+\).*ata-dependent") as caught:
        to_onnx(nn.Sequential(nn.ReLU(), nn.Sequential(BranchOnData())), path, (x,))
    assert caught.value.__cause__ is not None
    assert not list(tmp_path.iterdir())
