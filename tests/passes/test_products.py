"""Products with a learned weight: wide results, and on a GPU no wide copies of the operands."""

from __future__ import annotations

import pytest
import torch
from passes_toys import relative
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from resfx.passes import products


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The CPU has no product with a result dtype: the same in float32. Returns the dtypes of the left operands, as they come."""
    seen, mm = [], torch.mm

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        seen.append(a.dtype)
        return mm(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(products, "widens_products", lambda x: True)
    monkeypatch.setattr(torch, "mm", product)
    return seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [-1, 1])
def test_half_precision_operands_stay_narrow(dtype: torch.dtype, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn((3, 5, 8) if dim == -1 else (3, 8, 5)).to(dtype).requires_grad_()
    weight = torch.randn(6, 8).to(dtype).requires_grad_()
    expected = products.wide_linear(x, weight, dim)
    g = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, weight), g)
    seen = as_on_a_gpu(monkeypatch)
    actual = products.wide_linear(x, weight, dim)
    assert seen == [dtype]
    assert actual.dtype == expected.dtype == torch.float32
    assert relative(actual, expected) < 1e-6
    for a, e in zip(torch.autograd.grad(actual, (x, weight), g), wanted, strict=True):
        assert a.dtype == dtype
        assert relative(a.double(), e.double()) < 2 * torch.finfo(dtype).eps


def test_wide_operands_take_the_plain_product(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = as_on_a_gpu(monkeypatch)
    x, weight = torch.randn(3, 8).double(), torch.randn(6, 8).double()
    assert torch.equal(products.wide_linear(x, weight, -1), x @ weight.t())
    products.wide_linear(x.bfloat16(), weight.float(), -1)
    assert not seen


def test_torch_has_such_a_product() -> None:
    with FakeTensorMode(), torch.no_grad():
        x, weight = torch.empty(3, 5, 8).bfloat16(), torch.empty(6, 8).bfloat16()
        assert products._WideProduct.apply(x, weight).dtype == torch.float32
