"""How exact every form is on every kind of model: `resfx.rewrite` against the eager reference, in float64.

`worst_errors(kind, form)` is one cell of the table that `benchmarks/exactness.py` prints; test_exactness.py asserts it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from passes_reference import REFERENCES, Branch, EventModel, Step, reference
from passes_toys import perturb, relative
from torch import Tensor, nn

import resfx
from resfx.passes.form import Form

D = 8
S = [("site", k) for k in range(6)]
STEPS: dict[str, list[Step]] = {
    "pre-norm": S,
    "post-norm": [step for k in range(5) for step in (("site", k), ("norm", k))],
    "conv": [S[0], ("relu",), S[1], ("relu",), S[2], S[3], ("relu",), S[4]],
    "tied loop": [S[0], S[1]] * 3,
}
KINDS = [*STEPS, "encoder-decoder"]
FORMS: list[Form] = [
    resfx.Standard(),
    resfx.DeltaAttention(),
    resfx.DeltaAttention(seeded=True, null_source=True),
    resfx.DeltaAttention(gate="scalar"),
    resfx.DeltaAttention(gate="vector"),
    resfx.DeltaAttention(gate="alpha"),
    resfx.DeltaAttention(tied=True),
    resfx.DeltaAttention(granularity="block", blocks=2),
    resfx.DeltaAttention(granularity="block", block_size=2, seeded=True, null_source=True, gate="vector"),
    resfx.DeltaAttention(granularity="block", block_size=1, official_sources=True),
    resfx.AttentionResidual(),
    resfx.AttentionResidual(tied=True),
    resfx.AttentionResidual(granularity="block", blocks=2),
    resfx.AttentionResidual(granularity="block", block_size=2),
    resfx.MultiGate(),
    resfx.MultiGate(streams=2, gate="competitive"),
    resfx.MultiGate(streams=3, tied=True),
    resfx.Review(),
    resfx.Review(tied=True),
    resfx.Highway(),
    resfx.Highway(convex=True),
    resfx.ScaledLoop(),
    resfx.ScaledLoop(lam=0.7, learnable=True),
]


class Cross(nn.Module):
    """A branch that reads another stream's end."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.q, self.kv = nn.LayerNorm(D), nn.Linear(D, D), nn.Linear(D, 2 * D)

    def forward(self, y: Tensor, memory: Tensor) -> Tensor:
        k, v = self.kv(memory).chunk(2, -1)
        return (self.q(self.ln(y)) @ k.transpose(1, 2)).softmax(-1) @ v


class EncoderDecoder(nn.Module):
    """Two streams: the encoder's three branches, and the decoder's, every second of which reads the encoder's end."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Branch(D) for _ in range(3))
        self.decoder = nn.ModuleList(Branch(D) if k % 2 == 0 else Cross() for k in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        for branch in self.encoder:
            x = x + branch(x)
        memory = self.norms[0](x)
        for k, branch in enumerate(self.decoder):
            y = y + (branch(y, memory) if k % 2 else branch(y))
        return self.norms[1](y), memory


def encoder_decoder_reference(form: Form, model: EncoderDecoder, own: dict[str, Any], x: Tensor, y: Tensor) -> Any:
    """Its outputs under `form`, with the new parameters of `own`."""

    def begin(stream: int, h0: Tensor, sites: int) -> Any:
        return REFERENCES[form.name](form, lambda o, n: own.get(f"residual.{stream}.{o}.{n}"), h0, [*range(sites)], -1)

    encoder, decoder = begin(0, x, 3), begin(1, y, 4)
    for k, branch in enumerate(model.encoder):
        encoder.write(k, branch(encoder.read(k)))
    memory = model.norms[0](encoder.end("final"))
    for k, branch in enumerate(model.decoder):
        h = decoder.read(k)
        decoder.write(k, branch(h, memory) if k % 2 else branch(h))
    return model.norms[1](decoder.end("final")), memory


class Errors(NamedTuple):
    """The worst relative error of the outputs, and of the gradients in every parameter, old and new, and every input."""

    output: float
    gradient: float


def build(kind: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model of a column and its inputs."""
    torch.manual_seed(0)
    if kind == "encoder-decoder":
        return EncoderDecoder().double(), (torch.randn(3, 5, D).double(), torch.randn(3, 4, D).double())
    x = torch.randn(3, D, 4, 5) if kind == "conv" else torch.randn(3, 4, D)
    return EventModel(STEPS[kind], D, conv=kind == "conv").double(), (x.double(), x.double())


def worst_errors(kind: str, form: Form, spoil: Callable[[nn.Module], None] | None = None) -> Errors:
    """Rewrite, move every new parameter away from its start, compare. `spoil` may damage the rewritten model in between."""
    model, inputs = build(kind)
    result = resfx.rewrite(model, form, inputs)
    assert not result.residual_map.refused
    perturb(result)
    new = {
        name: p.detach().clone().requires_grad_()
        for name, p in result.named_parameters()
        if name.startswith("residual.")
    }
    if spoil is not None:
        spoil(result)
    ours, theirs = _leaves(inputs), _leaves(inputs)
    actual = result(*ours)
    if isinstance(model, EncoderDecoder):
        expected = encoder_decoder_reference(form, model, new, *theirs)
    else:
        expected = reference(form, model, lambda o, n: new.get(f"residual.0.{o}.{n}"), *theirs)
    assert len(actual) == len(expected)
    own = dict(result.named_parameters())
    plain = dict(model.named_parameters())
    assert own.keys() == {*plain, *new}
    got = _gradients(actual, {**own, **dict(enumerate(ours))})
    want = _gradients(expected, {**plain, **new, **dict(enumerate(theirs))})
    return Errors(
        max(relative(a, e) for a, e in zip(actual, expected, strict=True)),
        max(relative(got[name], want[name]) for name in want),
    )


def _leaves(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(i.detach().clone().requires_grad_() for i in inputs)


def _gradients(outputs: tuple[Tensor, ...], leaves: dict[Any, Tensor]) -> dict[Any, Tensor]:
    loss = sum((o * torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape).sin()).sum() for o in outputs)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {n: torch.zeros_like(leaf) if g is None else g for (n, leaf), g in zip(leaves.items(), found, strict=True)}
