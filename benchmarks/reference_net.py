"""The net that the cost of every form is stated for: pre-norm sublayers with as little in them as a model can have.

Sublayers alternate a D x D linear and a D-4D-D GELU MLP, each behind an RMSNorm, without biases. Little arithmetic and short branches:
what a form adds shows more here than in any real model. `published` is the same net with Delta or Attention residuals written the way the
papers' code writes them, over a stack of the sources.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import resfx
from resfx.passes.form import Form

SUBLAYERS, WIDTH, BATCH, TOKENS = 12, 1024, 8, 2048


class Sublayer(nn.Module):
    """A norm and a branch."""

    def __init__(self, width: int, mlp: bool) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.body: nn.Module = nn.Linear(width, width, bias=False)
        if mlp:
            up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
            self.body = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        u: Tensor = self.body(self.norm(x))
        return u


class ReferenceNet(nn.Module):
    """h <- h + sublayer(h)."""

    def __init__(self, sublayers: int = SUBLAYERS, width: int = WIDTH) -> None:
        super().__init__()
        self.sublayers = nn.ModuleList(Sublayer(width, mlp=k % 2 == 1) for k in range(sublayers))

    def forward(self, x: Tensor) -> Tensor:
        for sublayer in self.sublayers:
            x = x + sublayer(x)
        return x


class Published(ReferenceNet):
    """Delta, written as published: every read stacks its sources; `block_size` sublayers make one source."""

    def __init__(self, sublayers: int = SUBLAYERS, width: int = WIDTH, block_size: int | None = None) -> None:
        super().__init__(sublayers, width)
        self.block_size = block_size
        self.query = nn.ParameterList(torch.zeros(width) for _ in range(sublayers))
        self.key_norm = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(sublayers))

    def forward(self, x: Tensor) -> Tensor:
        sources, boundary = [x], x
        for k, sublayer in enumerate(self.sublayers):
            if self.block_size and k and k % self.block_size == 0:
                sources.append(x - boundary)
                boundary = x
            u = sublayer(x + self._read(k, sources) if k else x)
            if not self.block_size:
                sources.append(u)
            x = x + u
        return x

    def _read(self, k: int, sources: list[Tensor]) -> Tensor:
        stack = torch.stack(sources)
        scores = torch.einsum("d,nbtd->nbt", self.query[k], self.key_norm[k](stack))
        return torch.einsum("nbt,nbtd->btd", scores.softmax(0), stack)


def forms(sublayers: int) -> dict[str, Form]:
    """Every form whose cost is stated, by the name of its line."""
    block = max(sublayers // 4, 1)
    return {
        "standard": resfx.Standard(),
        "delta": resfx.DeltaAttention(),
        "delta, 4 blocks": resfx.DeltaAttention(granularity="block", block_size=block),
        "attention residual": resfx.AttentionResidual(),
        "attention residual, 4 blocks": resfx.AttentionResidual(granularity="block", block_size=block),
        "multi gate": resfx.MultiGate(),
        "review": resfx.Review(),
        "highway": resfx.Highway(),
        "scaled loop": resfx.ScaledLoop(),
    }


def rewritten(form: Form, sublayers: int = SUBLAYERS, width: int = WIDTH) -> nn.Module:
    """The net as `resfx.rewrite` gives it, in bfloat16, without memory for its parameters; any batch and length."""
    with torch.device("meta"):
        net, x = ReferenceNet(sublayers, width), torch.empty(2, 8, width)
    return resfx.rewrite(net.bfloat16(), form, (x.bfloat16(),))


def with_memory(net: nn.Module) -> nn.Module:
    """`net` with new parameters of the same names and shapes: fake ones under FakeTensorMode."""
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=parameter.dtype)
            setattr(module, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    return net


def example(width: int = WIDTH) -> Tensor:
    """The input that the figures are for."""
    return torch.empty(BATCH, TOKENS, width, dtype=torch.bfloat16)
