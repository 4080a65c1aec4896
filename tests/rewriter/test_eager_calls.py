"""Submodules that can't be traced stay eager, and the stream around them is found and rewritten."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import resfx
from resfx.eager_calls import refuse_unfolded

D = 8


class Experts(nn.Module):
    """Routed experts, by a loop over those that were hit: control flow on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            rows = torch.where(chosen == number)[0]
            out.index_add_(0, rows, self.experts[number](x[rows]))
        return out


class Routed(nn.Module):
    """Tokens in one row, as mixtures of experts have them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(D, 3), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, D)
        return self.experts(flat, self.router(flat).argmax(-1)).reshape(x.shape)


class Block(nn.Module):
    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp, self.branch = nn.LayerNorm(D), nn.Linear(D, D), branch
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mlp(self.norm(x)))
        return x + self.branch(self.norm(x))


class Decoder(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Linear(D, D), nn.ModuleList(map(Block, branches))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return self.linear(x) if x.sum() > 0 else x


class EarlyExit(nn.Module):
    """Holds the stream itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.a(x)
        return x + self.b(x) if x.mean() > 0 else x


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class CompilerAware(nn.Module):
    """Makes a default mask only where it believes to run eagerly; transformers has such models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[1])
        return x + self.linear(x * mask[:, None])


class LayerDrop(nn.Module):
    """Skips layers by chance while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training or torch.rand([]) > 0.5:
                x = x + layer(x)
        return x


class Recasting(nn.Module):
    """Casts its own layer on the way, which torch.export can't follow."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(x.dtype)
        return self.linear(x)


def x(batch: int = 2, length: int = 5) -> Tensor:
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(batch))


def test_find_goes_around_what_stays_eager() -> None:
    found = resfx.find(Decoder(Routed(), Routed()), (x(),))
    assert [len(stream.sites) for stream in found.streams] == [4]
    note = next(note for note in found.notes if "eager" in note)
    assert "`blocks.0.branch.experts`" in note
    assert "blocks.1.branch.experts" in note


@pytest.mark.parametrize("batch", [1, 2])
def test_rewritten_around_what_stays_eager(batch: int) -> None:
    """Warm, in both modes, on sizes that the capture has not seen."""
    model = Decoder(Routed(), Routed()).eval()
    result = resfx.rewrite(model, resfx.DeltaAttention(), (x(batch),), warm_start=True)
    assert set(model.state_dict()) <= set(result.state_dict())
    for training in (False, True):
        model.train(training)
        result.train(training)
        for value in (x(batch), x(3, 7)):
            torch.manual_seed(0)
            want = model(value)
            torch.manual_seed(0)
            assert torch.allclose(result(value), want, atol=1e-6)
    result(x()).sum().backward()
    assert all(p.grad is not None for name, p in result.named_parameters() if "experts" in name and "0.weight" in name)


def test_the_eager_call_is_the_users_module() -> None:
    model = Decoder(Routed()).eval()
    result = resfx.rewrite(model, resfx.Review(), (x(),), copy=False, warm_start=True)
    assert result.get_submodule("blocks.0.branch") is model.blocks[0].branch
    copied = copy.deepcopy(result)
    assert torch.equal(copied(x()), result(x()))


def test_what_fails_in_its_own_way_stays_eager_too() -> None:
    model = Decoder(Recasting()).eval()
    assert len(resfx.find(model, (x(),)).sites) == 2


def test_a_model_that_asks_for_the_compiler_runs_as_it_does_eagerly() -> None:
    model = CompilerAware().eval()
    result = resfx.rewrite(model, resfx.Review(), (x(),), warm_start=True)
    assert torch.allclose(result(x(3, 7)), model(x(3, 7)), atol=1e-6)
    assert torch.compiler.is_compiling() is False


@pytest.mark.parametrize("inner", [EarlyExit, lambda: Wrapped(EarlyExit())], ids=["root", "wrapped"])
def test_a_stream_that_cannot_be_traced_is_an_error(inner: type[nn.Module]) -> None:
    """Never an empty map."""
    model = Wrapped(inner())
    for call in (resfx.find, lambda m, a: resfx.rewrite(m, resfx.Review(), a)):
        with pytest.raises(resfx.CaptureError, match="control flow on a tensor's values") as caught:
            call(model, (x(),))
        assert "inner" in str(caught.value)
    with pytest.raises(resfx.CaptureError):
        resfx.find(EarlyExit(), (x(),))


def test_a_stream_stays_in_the_graph_where_only_train_mode_cannot_be_traced() -> None:
    model = Wrapped(LayerDrop()).eval()
    result = resfx.rewrite(model, resfx.DeltaAttention(), (x(),), warm_start=True)
    assert torch.allclose(result(x(3)), model(x(3)), atol=1e-6)
    assert any("train mode does not trace" in note for note in result.residual_map.notes)
    assert not any("kept eager" in note for note in result.residual_map.notes)
    with pytest.raises(resfx.CaptureError, match="train mode does not trace"):
        result.train()(x())


def test_what_writes_its_input_is_no_opaque_call() -> None:
    with pytest.raises(resfx.CaptureError, match="control flow on a tensor's values"):
        resfx.find(Decoder(WritesItsInput()), (x(),))


def test_the_model_is_left_as_it_was() -> None:
    model = Decoder(Routed())
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    resfx.find(model, (x(),))
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_what_can_not_be_one_call_is_named_with_its_line() -> None:
    graph = torch.fx.Graph()
    call = graph.call_function(torch.ops.resfx.eager_call.default, (graph.placeholder("x"), 0, "body.inner"))
    call.meta["stack_trace"] = '  File "/user/model.py", line 7, in forward\n    return self.inner(x)\n'
    with pytest.raises(resfx.CaptureError, match=r"`body\.inner`, called at /user/model\.py:7,"):
        refuse_unfolded(graph)


class Pieces(nn.Module):
    """Images packed into one row of patches, as towers of vision-language models have them: each piece by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        pieces = torch.split(self.linear(x), lengths.tolist())
        return torch.cat([piece.softmax(0) for piece in pieces])


class Packed(nn.Module):
    """`grid` [1, 2] holds the rows and columns of the patches: no example with another size of `x` is told by the sizes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Pieces() for _ in range(2))
        self.mlp = nn.Linear(D, D)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        for part in self.parts:
            x = x + part(x, grid.prod(-1))
            x = x + self.mlp(x)
        return x


def test_a_row_of_packed_pieces() -> None:
    model = Packed().eval()
    example = torch.randn(12, D), torch.tensor([[3, 4]])
    found = resfx.find(model, example)
    assert [len(stream.sites) for stream in found.streams] == [4]
    rewritten = resfx.rewrite(model, resfx.DeltaAttention(), example, warm_start=True)
    for grid in (example[1], torch.tensor([[2, 5]])):
        x = torch.randn(int(grid.prod()), D)
        torch.testing.assert_close(rewritten(x, grid), model(x, grid), rtol=0, atol=0)
