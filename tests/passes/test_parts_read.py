"""Updates of a part of the state whose branch reads that very part: `p = x[:, 1:]; x = cat([x[:, :1], p + f(p)])`."""

from __future__ import annotations

import pytest
import torch
from new_parameters import new_parameters, perturb
from torch import Tensor, nn
from torch.nn.functional import rms_norm

import resfx

D = 8


class Block(nn.Module):
    """An update of all but the first token by a convolution over them, then one of the whole state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(D, D, 3, padding=1, groups=D)
        self.norm, self.mlp, self.side = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, D)

    def part(self, p: Tensor) -> Tensor:
        return self.conv(p)

    def whole(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        first, others = x[:, :1], x[:, 1:]
        image = as_image(others)
        image = image + self.part(image)
        x = torch.cat([first, as_tokens(image)], 1)
        return x + self.whole(x)


class EarlyBlock(Block):
    """Reads the updated part in another form than the one that is put back."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        first, others = x[:, :1], x[:, 1:]
        image = as_image(others)
        image = image + self.part(image)
        seen = self.side(image.mean((2, 3)))
        x = torch.cat([first, as_tokens(image)], 1)
        return x + self.whole(x), seen


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class EarlyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(EarlyBlock() for _ in range(2)), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = self.blocks[0](x)
        x, seen = self.blocks[1](x)
        return self.head(x), seen


def as_image(tokens: Tensor) -> Tensor:
    return tokens.transpose(1, 2).reshape(tokens.shape[0], -1, 4, 4)


def as_tokens(image: Tensor) -> Tensor:
    return image.flatten(2).transpose(1, 2)


def delta(net: Net, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """DeltaAttention by hand: every read but the first is of h plus the attention over the first state and all updates."""
    sources = [x]

    def read(k: int, h: Tensor) -> Tensor:
        if k == 0:
            return h
        stack = torch.stack(sources)
        keys = rms_norm(stack, (D,), parameters[f"residual.0.{k}.key_norm"], 1e-6)
        weights = (keys @ parameters[f"residual.0.{k}.query"]).softmax(0)
        return h + (weights[..., None] * stack).sum(0)

    h = x
    for k, block in enumerate(net.blocks):
        u = as_tokens(block.part(as_image(read(2 * k, h)[:, 1:])))
        sources.append(torch.cat([torch.zeros_like(h[:, :1]), u], 1))
        h = h + sources[-1]
        sources.append(block.whole(read(2 * k + 1, h)))
        h = h + sources[-1]
    return net.head(h)


def test_the_branch_reads_the_part_of_the_form_s_read() -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 17, D, dtype=torch.float64)
    result = resfx.rewrite(net, resfx.DeltaAttention(), (x,))
    perturb(result)
    torch.testing.assert_close(result(x), delta(net, new_parameters(result), x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("form", [resfx.MultiGate(), resfx.AttentionResidual(), resfx.Review()], ids=lambda f: f.name)
def test_every_new_parameter_reaches_the_output(form: resfx.Form) -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 17, D, dtype=torch.float64)
    result = resfx.rewrite(net, form, (x,))
    perturb(result)
    result(x).square().sum().backward()
    silent = [name for name, p in new_parameters(result).items() if p.grad is None or not p.grad.abs().max() > 0]
    assert not silent


@pytest.mark.parametrize("form", [resfx.DeltaAttention(), resfx.MultiGate()], ids=lambda f: f.name)
def test_warm_start(form: resfx.Form) -> None:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(2, 17, D, dtype=torch.float64)
    result = resfx.rewrite(net, form, (x,), warm_start=True)
    torch.testing.assert_close(result(x), net(x), rtol=1e-9, atol=1e-9)


def test_a_part_that_is_read_before_it_is_put_back_is_refused() -> None:
    x = torch.randn(2, 17, D)
    with pytest.raises(resfx.RewriteError, match=r"site 2 .* reads before it is put back"):
        resfx.rewrite(EarlyNet(), resfx.MultiGate(), (x,))


class TokensFirst(Block):
    """A module reads the updated tokens before they are joined with the first one again."""

    def forward(self, x: Tensor) -> Tensor:
        others = x[:, 1:] + self.side(x[:, 1:])
        update = self.mlp(self.norm(others))
        x = torch.cat([x[:, :1], others], 1)
        return x + torch.cat([update.mean(1, keepdim=True), update], 1)


def test_a_module_that_reads_the_part_is_called_with_a_part_of_the_whole() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(TokensFirst(), TokensFirst()).double(), torch.randn(2, 17, D, dtype=torch.float64)
    result = resfx.rewrite(net, resfx.MultiGate(), (x,), warm_start=True)
    assert len(result.residual_map.sites) == 4
    assert not any("kept as traced" in note for note in result.residual_map.notes)
    torch.testing.assert_close(result(x), net(x), rtol=1e-9, atol=1e-9)
    perturb(result)
    assert not torch.allclose(result(x), net(x), atol=1e-3)
