"""Wrong arguments meet errors of resfx that say what to write instead."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import resfx

X = torch.randn(2, 5, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.f(x)
        return x + self.g(x)


def quantised(model: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def rewritten(**options: Any) -> resfx.Rewritten:
    return resfx.rewrite(Net(), resfx.Review(), (X,), **options)


def to_onnx(**options: Any) -> None:
    resfx.export.to_onnx(Net(), "never_written.onnx", (X,), **options)


JOBS: list[tuple[Callable[[], Any], type[resfx.ResfxError], str]] = [
    (lambda: resfx.find(torch.jit.trace(Net(), (X,)), (X,)), resfx.NotAModule, "TorchScript"),
    (lambda: resfx.rewrite(torch.jit.trace(Net(), (X,)), resfx.Review(), (X,)), resfx.NotAModule, "TorchScript"),
    (
        lambda: resfx.find(quantised(Net()), (X,)),
        resfx.CaptureError,
        "module `f._packed_params`: it keeps its weights in",
    ),
    (lambda: resfx.rewrite(quantised(Net()), resfx.Review(), (X,)), resfx.CaptureError, "quantise with torchao"),
    (lambda: resfx.find(Net(), (X,), [1]), resfx.CaptureError, "kwargs must be a dict"),  # type: ignore[arg-type]
    (lambda: resfx.find(Net(), 5), resfx.CaptureError, "args must be a tuple"),  # type: ignore[arg-type]
    (lambda: resfx.find(Net(), X), resfx.CaptureError, r"write \(x,\)"),  # type: ignore[arg-type]
    (
        lambda: resfx.rewrite(Net().double(), resfx.Review(), (X,)),
        resfx.CaptureError,
        r"(?s)the model itself fails on the example inputs in module `f`: RuntimeError.*errors\.py:\d+: x = x \+ self\.f\(x\)",
    ),
    (
        lambda: resfx.find(Net(), (X[..., :7],)),
        resfx.CaptureError,
        r"(?s)the model itself fails on the example inputs in module `f`: .*10x7 and 8x8.*errors\.py:\d+: x = x \+ self",
    ),
    (lambda: resfx.find(Net().to("meta"), (X,)), resfx.CaptureError, r"route failed in module `f`: .*meta"),
    (
        lambda: resfx.rewrite(Net(), (X,), resfx.Review()),  # type: ignore[arg-type]
        resfx.FormError,
        "got a tuple .the form comes before the example call.$",
    ),
    (
        lambda: resfx.rewrite(Net(), "delta", (X,)),  # type: ignore[arg-type]
        resfx.FormError,
        "got 'delta' \\(a form as text is for the command line",
    ),
    (lambda: rewritten()(X.double()), resfx.GuardError, r"it was torch\.float32: cast it, or rewrite again"),
    (lambda: rewritten()(X[0]), resfx.GuardError, "it had 3: reshape it, or rewrite again"),
    (lambda: rewritten(select=3), resfx.SelectionError, "select=3"),
    (lambda: rewritten(streams=[]), resfx.SelectionError, "names no stream"),
    (lambda: rewritten(streams="0"), resfx.SelectionError, "names no stream"),
    (lambda: resfx.DeltaAttention(foo=1), resfx.FormError, "unknown option 'foo'"),
    (lambda: resfx.MultiGate(streams="a"), resfx.FormError, "streams='a'"),
    (lambda: resfx.Review(eps=None), resfx.FormError, "eps=None"),
    (lambda: resfx.DeltaAttention(query_init_std="a"), resfx.FormError, "query_init_std"),
    (lambda: resfx.export.to_onnx(Net(), None, (X,)), resfx.ResfxError, "name a file"),  # type: ignore[arg-type]
    (lambda: to_onnx(opset="a"), resfx.ResfxError, "opset='a'"),
    (lambda: to_onnx(opset=True), resfx.ResfxError, "opset=True"),
    (lambda: to_onnx(tolerance="x"), resfx.ResfxError, "tolerance='x'"),
    (lambda: to_onnx(functions=3), resfx.ResfxError, "functions=3"),
    (lambda: to_onnx(dynamic_shapes=5), resfx.ResfxError, "dynamic_shapes=5"),
    (lambda: pickle.dumps(rewritten()), resfx.NotOnRewritten, r"resfx\.save"),
]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("number", range(len(JOBS)))
def test_error_is_ours(number: int) -> None:
    job, kind, text = JOBS[number]
    with pytest.raises(kind, match=text):
        job()


def test_meta_tensors_run() -> None:
    model = Net().to("meta")
    result = resfx.rewrite(model, resfx.DeltaAttention(), (X.to("meta"),))
    assert result(X.to("meta")).shape == X.shape


def test_forward_that_holds_the_original() -> None:
    model = Net()
    model.forward = lambda x: x + model.f(x) * 2  # type: ignore[method-assign]
    with pytest.raises(resfx.RewriteError, match="copy=False"):
        resfx.rewrite(model, resfx.Standard(), (X,))
    assert torch.equal(resfx.rewrite(model, resfx.Standard(), (X,), copy=False)(X), model(X))
    plain = Net()
    plain.forward = plain.forward  # type: ignore[method-assign]
    assert torch.equal(resfx.rewrite(plain, resfx.Standard(), (X,))(X), plain(X))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_a_result_can_be_quantised() -> None:
    """As the error about quantised models says: its leaves are the model's own."""
    plain = Net().eval()
    result = quantised(resfx.rewrite(plain, resfx.DeltaAttention(), (X,), warm_start=True).eval())
    assert not isinstance(result.get_submodule("f"), nn.Linear)
    torch.testing.assert_close(result(X), quantised(plain)(X))
