"""In-place operations through every kind of view: same numbers, no write left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from capture_helpers import tensors
from torch import nn

from resfx.capture import capture


class Written(nn.Module):
    """Runs one in-place program on a tensor of its own, and reads base and view afterwards."""

    def __init__(self, program: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.program = program
        self.inner = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.program(x * 1.0, self.inner(x))


def whole(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    before = h.sin()
    h.add_(f, alpha=2).mul_(f).relu_()
    return before, h, h.view(-1)


def through_slice(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    view = h[:, 1:3]
    view += f[:, 1:3]
    return h, view, h[:, 2]


def through_select(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h[:, 0].mul_(f[:, 0])
    h[:, -1] = f[:, -1]
    return h, h[:, 0]


def through_transpose(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    turned = h.transpose(1, 2)
    turned[:, 1:] += f.transpose(1, 2)[:, 1:]
    return h, turned, h.permute(2, 0, 1)


def whole_transpose(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    turned = h.transpose(0, 1)
    turned += f.transpose(0, 1)
    return (h * 2,)


def through_permute_and_unsqueeze(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h.permute(2, 0, 1).unsqueeze(0).sub_(f.permute(2, 0, 1).unsqueeze(0))
    return (h,)


def through_view(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    flat = h.view(-1, 2)
    flat.add_(f.reshape(-1, 2))
    return h, flat


def through_chunk(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    left, right = h.chunk(2, -1)  # eager allows writing to these only without gradients
    right += f.detach()[..., :3]
    left.mul_(right)
    return h, left, right


def fills(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h[:, 0].fill_(2.0)
    h[:, 1].zero_()
    h.masked_fill_(f > 0, -1.0)
    return h, h[:, 0]


def by_index(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h[f > 0.5] = 3.0
    h.index_put_((torch.tensor([0]), torch.tensor([1])), f[0, 1])
    return (h,)


def copies(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h.copy_(f[:1])
    f.add_(1)
    return h, f


def copies_then_a_part(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h.copy_(f)
    h[:, 1:] = f[:, :-1].sin()
    f.mul_(2)
    return h, f


def copies_and_reads_the_result(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    copied = h.copy_(f)
    copied.add_(1)
    h[:, 0] = 0
    return h, copied, f


def copies_itself_and_more(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    same = h
    same.copy_(h + f)
    h[:, 0] = 0
    same.mul_(2)
    return h, same


def a_part_that_was_copied_in(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    part = f[:, 1:] * 3
    h[:, 1:] = part
    h.add_(1)
    return h, part


def keeps_dtype(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    half = h.to(torch.bfloat16)
    half += f
    return half, half.float()


def new_shape(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h.unsqueeze_(0)
    return h + f, h.squeeze(0)


def expanded_write(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h[:, :2, 1:4] = f[:, :1, :1]
    return (h,)


def results_of_topk(h: torch.Tensor, f: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, _ = f.topk(2, -1)
    values /= values.sum(-1, keepdim=True)
    return values, f


PROGRAMS = [
    whole,
    through_slice,
    through_select,
    through_transpose,
    whole_transpose,
    through_permute_and_unsqueeze,
    through_view,
    through_chunk,
    fills,
    by_index,
    copies,
    copies_then_a_part,
    copies_and_reads_the_result,
    copies_itself_and_more,
    a_part_that_was_copied_in,
    keeps_dtype,
    new_shape,
    expanded_write,
    results_of_topk,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_program_is_functional_and_equal(program: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    torch.manual_seed(0)
    model = Written(program).eval()
    captured = capture(model, (torch.randn(2, 4, 6),))
    written = [
        str(node.target)
        for node in captured.graph.nodes
        if str(node.target).startswith("aten.") and str(node.target).split(".")[1].endswith("_")
    ]
    assert not written
    x = torch.randn(3, 4, 6) if ("x", 0) in captured.open_dims else torch.randn(2, 4, 6)
    with torch.no_grad():
        expected, got = tensors(model(x)), tensors(captured.graph_module(x))
    assert len(expected) == len(got)
    for left, right in zip(expected, got, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)


def test_values_keep_their_meta() -> None:
    captured = capture(Written(through_slice), (torch.randn(2, 4, 6),))
    for node in captured.graph.nodes:
        if node.op == "call_function":
            assert "val" in node.meta, node
            assert "nn_module_stack" in node.meta, node
            assert "stack_trace" in node.meta, node


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.f(x)
        return x.sin()


def test_a_write_to_an_input_is_noted() -> None:
    model, x = WritesItsInput(), torch.randn(2, 6)
    captured = capture(model, (x.clone(),))
    assert any("input `x`" in note for note in captured.notes)
    y = x.clone()
    with torch.no_grad():
        assert torch.equal(captured.graph_module(y), model(x.clone()))
    assert torch.equal(y, x)


class Counts(nn.Module):
    """Buffers stay what they are: state that a call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(6))
        self.f = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.mean.mul_(0.5).add_(x.mean(0), alpha=0.5)
        return x + self.f(x) - self.mean


def test_buffers_stay_in_place() -> None:
    model, x = Counts(), torch.randn(4, 6)
    captured = capture(model, (x,))
    assert torch.equal(model.calls, torch.zeros(()))
    with torch.no_grad():
        first, second = captured.graph_module(x), captured.graph_module(x)
    assert captured.graph_module.calls.item() == 2
    assert not torch.equal(first, second)


class Assigns(nn.Module):
    """Writes to a buffer that a branch is multiplied by."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.f = kind, nn.Linear(6, 6)
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.kind == "in place":
            self.count += 1
            return (x + self.f(x) * self.count,)
        if self.kind == "before":
            self.count = self.count + 1
            return (x + self.f(x) * self.count,)
        if self.kind == "after":
            y = x + self.f(x) * self.count
            self.count = self.count + 1
            return (y,)
        if self.kind == "both":
            self.count.mul_(2)
            y = x + self.f(x) * self.count
            self.count = self.count + 1
            return (y,)
        before = self.count
        self.count = self.count + 1
        self.last = before * 2
        return x + self.f(x) * before, before


@pytest.mark.parametrize("kind", ["in place", "before", "after", "both", "kept"])
def test_a_buffer_that_is_written_and_read(kind: str) -> None:
    model = Assigns(kind)
    x = torch.randn(4, 6)
    captured = capture(model, (x,))
    wanted, got = model(x), None
    wanted[0].sin().sum().backward()
    expected = [model.f.weight.grad, model.count.clone(), model.last.clone()]
    model.zero_grad()
    graph_module = captured.graph_module
    for name, value in (("count", torch.ones(())), ("last", torch.zeros(()))):
        setattr(graph_module, name, value)
    got = tensors(graph_module(x))
    got[0].sin().sum().backward()
    assert all(map(torch.equal, wanted, got))
    assert all(map(torch.equal, expected, (model.f.weight.grad, graph_module.count, graph_module.last)))
