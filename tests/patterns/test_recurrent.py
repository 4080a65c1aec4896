"""Recurrences written out over the steps of a sequence: what they carry along is no residual stream."""

from __future__ import annotations

import torch
from patterns_marks import Case, D, Net, case, cases_of
from torch import Tensor, nn

STEPS = 4


@case((2, STEPS, D))
class DeltaRule(Net):
    """A fast-weight memory, read and corrected at each step: keys and values are data."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.f(x), self.g(x), self.h(x)
        memory, out = x.new_zeros(x.shape[0], D, D), []
        for t in range(STEPS):
            known = torch.einsum("bkv,bk->bv", memory, k[:, t])
            memory = memory + torch.einsum("bk,bv->bkv", k[:, t], v[:, t] - known)  # MISS order: recurrence
            out.append(torch.einsum("bkv,bk->bv", memory, q[:, t]))
        return x + torch.stack(out, 1)  # SITE


@case((2, STEPS, D))
class ExponentialGates(Net):
    """xLSTM's scalar cell: cell and normaliser are gated, the stabiliser is a running maximum."""

    def setup(self) -> None:
        self.inputs, self.recurrent = nn.Linear(D, 4 * D), nn.Linear(D, 4 * D)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.inputs(self.n(x))
        cell = size = top = hidden = x.new_zeros(x.shape[0], D)
        out = []
        for t in range(STEPS):
            z, i, f, o = (inputs[:, t] + self.recurrent(hidden)).chunk(4, -1)
            highest = torch.maximum(f + top, i)  # MISS order: recurrence
            i, f, top = torch.exp(i - highest), torch.exp(f + top - highest), highest
            cell = f * cell + i * z.tanh()  # MISS structure: gated mix
            size = f * size + i  # MISS structure: gated mix
            hidden = o.sigmoid() * cell / size
            out.append(hidden)
        return x + self.f(torch.stack(out, 1))  # SITE


@case((2, STEPS, D))
class SelectiveScan(Net):
    """Mamba: the state decays by what the input says."""

    def forward(self, x: Tensor) -> Tensor:
        step, write = self.f(x).sigmoid(), self.g(x)
        state, out = x.new_zeros(x.shape[0], D), []
        for t in range(STEPS):
            state = state * torch.exp(-step[:, t]) + step[:, t] * write[:, t]  # MISS learned: meets no weight
            out.append(state)
        return x + self.h(torch.stack(out, 1))  # SITE


@case((2, STEPS, D))
class GatedCell(Net):
    def setup(self) -> None:
        self.cell = nn.GRUCell(D, D)

    def forward(self, x: Tensor) -> Tensor:
        state, out = x.new_zeros(x.shape[0], D), []
        for t in range(STEPS):
            state = self.cell(x[:, t], state)
            out.append(state)
        return x + self.h(torch.stack(out, 1))  # SITE


@case((2, STEPS, D), streams=2)
class ResidualCell(Net):
    """Its own weights map the hidden state, and the result is added to it: a stream over the steps."""

    def forward(self, x: Tensor) -> Tensor:
        inputs, state, out = self.g(x), x.new_zeros(x.shape[0], D), []
        for t in range(STEPS):
            state = state + self.f(state + inputs[:, t])  # SITE x4
            out.append(state)
        return x + self.h(torch.stack(out, 1))  # SITE


@case((2, STEPS, D), streams=STEPS)
class FrameByFrame(Net):
    """Each frame has its own stream, with the same weights."""

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for frame in x.unbind(1):
            frame = frame + self.f(frame)  # SITE x4
            frame = frame + self.g(frame)  # SITE x4
            out.append(frame)
        return torch.stack(out, 1)


@case((2, D), (2, 3, D, D))
class GeneratedWeights(Net):
    """A second input makes the weights of all layers: no recurrence, for the state does not start from nothing."""

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        weights = self.f(code)
        for layer in range(3):
            x = x + torch.bmm(x[:, None], weights[:, layer])[:, 0]  # SITE x3
        return x


@cases_of(__name__)
def test_found(case: Case) -> None:
    case.check()
