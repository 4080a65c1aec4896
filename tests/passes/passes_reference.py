"""The forms written once more, eagerly and in the published style (stacked sources), to judge the passes by.

A model is a list of steps; `EventModel` runs them plainly, `reference` runs them under a form as FORMS defines it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Step = tuple[Any, ...]
Params = Callable[[str, str], Tensor | None]


class Branch(nn.Module):
    """Norm and two Linear layers, on the last axis."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.ln, self.a, self.b = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(self.ln(x))))


class ConvBranch(nn.Module):
    """Two convolutions, on axis 1."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(d, d, 3, padding=1), nn.Conv2d(d, d, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class EventModel(nn.Module):
    """Steps: ("site", k), ("slice", k), ("norm", k), ("scale", a), ("div", a), ("side",), ("tap",), layouts, copies."""

    def __init__(self, steps: list[Step], d: int = 8, conv: bool = False) -> None:
        super().__init__()
        self.steps, self.conv = steps, conv
        count = 1 + max(step[1] for step in steps if "site" in step[0] or step[0] == "slice")
        self.sub = nn.ModuleList((ConvBranch if conv else Branch)(d) for _ in range(count))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(count))

    def forward(self, x: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        outputs, entry = [], x
        for kind, *rest in self.steps:
            match kind:
                case "site":
                    x = x + self.sub[rest[0]](x)
                case "site_":
                    x += self.sub[rest[0]](x)
                case "flipped_site":
                    x = x + self.sub[rest[0]](x.transpose(1, 2)).transpose(1, 2)
                case "slice":
                    part = x[:, 1:]
                    x = torch.slice_scatter(x, part + self.sub[rest[0]](part), 1, 1)
                case "norm":
                    x = self.norms[rest[0]](x)
                case "relu":
                    x = x.relu()
                case "scale":
                    x = x * rest[0]
                case "div":
                    x = x / rest[0]
                case "side":
                    x = x + c
                case "flip":
                    x = x.transpose(1, 2)
                case "fold":
                    x = x.reshape(-1, x.shape[-1])
                case "unfold":
                    x = x.reshape(entry.shape)
                case "clone":
                    x = x.clone()
                case "tap":
                    outputs.append(x.sin())
        return x, *outputs


def reference(form: Any, model: EventModel, p: Params, x: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """The outputs of `model` under `form`, in the entry's layout; `p(owner, name)` is a parameter or None."""
    sites = [step[1] for step in model.steps if "site" in step[0] or step[0] == "slice"]
    ref = REFERENCES[form.name](form, p, x, sites, 1 if model.conv else -1)
    outputs, site, taps, last = [], 0, 0, _last_site(model.steps)
    for position, (kind, *rest) in enumerate(model.steps):
        match kind:
            case "site" | "site_" | "flipped_site":
                ref.write(site, model.sub[rest[0]](ref.read(site)))
                site += 1
            case "slice":
                update = model.sub[rest[0]](ref.read(site)[:, 1:])
                ref.write(site, torch.cat([torch.zeros_like(x[:, :1]), update], 1))
                site += 1
            case "norm":
                ref.norm(model.norms[rest[0]])
            case "relu":
                ref.norm(torch.relu)
            case "scale":
                ref.scale(rest[0])
            case "div":
                ref.scale(1 / rest[0])
            case "side":
                ref.side(c)
            case "tap":
                owner = "final" if position > last else f"tap{taps}"
                outputs.append(ref.end(owner).sin())
                taps += owner != "final" and ref.end_has_parameters()
    return ref.end("final"), *outputs


def _last_site(steps: list[Step]) -> int:
    return max(i for i, step in enumerate(steps) if "site" in step[0] or step[0] == "slice")


class Plain:
    """The running state, and how a vector along D meets it."""

    def __init__(self, form: Any, p: Params, h0: Tensor, sites: list[int], dim: int) -> None:
        self.form, self.p, self.h, self.sites, self.dim = form, p, h0, sites, dim

    def owner(self, site: int) -> str:
        tied = getattr(self.form, "tied", False) or self.form.name == "scaled_loop"
        return str(list(dict.fromkeys(self.sites)).index(self.sites[site]) if tied else site)

    def get(self, site: int | str, name: str) -> Tensor | None:
        return self.p(site if isinstance(site, str) else self.owner(site), name)

    def last(self, v: Tensor) -> Tensor:
        return v.movedim(self.dim, -1)

    def back(self, v: Tensor) -> Tensor:
        return v.movedim(-1, self.dim)

    def rms(self, v: Tensor, eps: float) -> Tensor:
        v = self.last(v)
        return v / (v.pow(2).mean(-1, keepdim=True) + eps).sqrt()

    def read(self, site: int) -> Tensor:
        return self.h

    def write(self, site: int, u: Tensor) -> None:
        self.h = self.h + u

    def norm(self, n: Callable[[Tensor], Tensor]) -> None:
        self.h = n(self.h)

    def scale(self, a: float) -> None:
        self.h = self.h * a

    def side(self, c: Tensor) -> None:
        self.h = self.h + c

    def end(self, owner: str) -> Tensor:
        return self.h

    def end_has_parameters(self) -> bool:
        return False

    def attend(self, owner: int | str, sources: list[Tensor]) -> Tensor:
        query, key_norm = self.get(owner, "query"), self.get(owner, "key_norm")
        v = torch.stack([self.last(s) for s in sources])
        if query is None:
            assert len(sources) == 1
            return sources[0]
        keys = torch.stack([self.rms(s, self.form.eps) for s in sources]) * key_norm
        weights = torch.einsum("d,n...d->n...", query, keys).softmax(0)
        return self.back(torch.einsum("n...,n...d->...d", weights, v))


class Delta(Plain):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.sources, self.mark = [self.h], self.h
        self.starts = _starts(self.form, len(self.sites))

    def read(self, site: int) -> Tensor:
        if site in self.starts and not self.form.official_sources:
            self.sources.append(self.h - self.mark)
            self.mark = self.h
        if site == 0 and not self.form.seeded:
            return self.h
        sources = list(self.sources)
        if self.form.null_source:
            sources.append(self.back(self.get(site, "null").expand_as(self.last(self.h))))
        read = self.h + self.attend(site, sources)
        match self.form.gate:
            case "scalar":
                g = torch.sigmoid(self.get(site, "gate_logit"))
            case "vector":
                logits = self.last(self.h) @ self.get(site, "gate_weight").T + self.get(site, "gate_bias")
                g = self.back(torch.sigmoid(logits))
            case "alpha":
                g = self.get(site, "alpha")
            case _:
                return read
        return (1 - g) * self.h + g * read

    def write(self, site: int, u: Tensor) -> None:
        if self.form.granularity == "sublayer":
            self.sources.append(u)
        elif site in self.starts and self.form.official_sources:
            self.sources.append(self.h - self.sources[-1])
        super().write(site, u)

    def scale(self, a: float) -> None:
        super().scale(a)
        self.sources, self.mark = [s * a for s in self.sources], self.mark * a


class AttnRes(Plain):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.done, self.running, self.norms = [self.h], None, []
        self.starts = _starts(self.form, len(self.sites))

    def _sources(self) -> list[Tensor]:
        return self.done if self.running is None else [*self.done, self.running]

    def _merge(self, owner: int | str) -> Tensor:
        value = self.attend(owner, self._sources())
        for n in self.norms:
            value = n(value)
        return value

    def _close(self, site: int) -> None:
        if self.running is not None and (self.form.granularity == "full" or site in self.starts):
            self.done, self.running = [*self.done, self.running], None

    def read(self, site: int) -> Tensor:
        self._close(site)
        return self._merge(site)

    def write(self, site: int, u: Tensor) -> None:
        self._close(site)
        self.running = u if self.running is None else self.running + u
        self.norms = []

    def norm(self, n: Callable[[Tensor], Tensor]) -> None:
        self.norms.append(n)

    def scale(self, a: float) -> None:
        self.done = [s * a for s in self.done]
        self.running = None if self.running is None else self.running * a

    def side(self, c: Tensor) -> None:
        if self.running is None:
            self.done = [*self.done[:-1], self.done[-1] + c]
        else:
            self.running = self.running + c

    def end(self, owner: str) -> Tensor:
        return self._merge(owner)

    def end_has_parameters(self) -> bool:
        return len(self._sources()) > 1


def _starts(form: Any, sites: int) -> list[int]:
    if form.block_size:
        return list(range(form.block_size, sites, form.block_size))
    if not form.blocks:
        return []
    sizes = [sites // form.blocks + (b < sites % form.blocks) for b in range(form.blocks)]
    return [sum(sizes[:b]) for b in range(1, form.blocks)]


class Gates(Plain):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.streams = [self.h]

    def _logits(self, w: Tensor) -> Tensor:
        normed = torch.stack([self.rms(s, self.form.eps) for s in self.streams])
        return torch.einsum("d,n...d->n...", w, normed) / math.sqrt(w.numel())

    def write(self, site: int, u: Tensor) -> None:
        if len(self.streams) < self.form.streams:
            self.streams.append(u)
        else:
            z = self._logits(self.get(site, "w_beta"))
            if self.form.gate == "independent":
                bias = self.get(site, "b_beta")
                b = torch.sigmoid(z + bias.reshape(-1, *[1] * (z.dim() - 1)))
            else:
                b = torch.cat([self.get(site, "forget").expand_as(z[:1]), z]).softmax(0)[1:]
            b = b.unsqueeze(self.dim if self.dim < 0 else self.dim + 1)
            self.streams = [(1 - g) * s + g * u for g, s in zip(b, self.streams, strict=True)]
        if len(self.streams) == 1:
            self.h = self.streams[0]
            return
        p = self._logits(self.get(site, "w_alpha")).softmax(0)
        self.h = self.back(torch.einsum("n...,n...d->...d", p, torch.stack([self.last(s) for s in self.streams])))

    def scale(self, a: float) -> None:
        super().scale(a)
        self.streams = [s * a for s in self.streams]

    def side(self, c: Tensor) -> None:
        super().side(c)
        self.streams = [s + c for s in self.streams]


class Reviewed(Plain):
    def write(self, site: int, u: Tensor) -> None:
        both = torch.cat([self.rms(self.h, self.form.eps), self.rms(u, self.form.eps)], -1)
        gate = torch.sigmoid(both @ self.get(site, "weight").T + self.get(site, "bias"))
        self.h = self.h + self.back(gate) * u


class High(Plain):
    def write(self, site: int, u: Tensor) -> None:
        g = self.back(torch.sigmoid(self.last(self.h) @ self.get(site, "weight").T + self.get(site, "bias")))
        self.h = (1 - g) * self.h + g * u if self.form.convex else self.h + g * u


class Scaled(Plain):
    def write(self, site: int, u: Tensor) -> None:
        repeats = self.sites.count(self.sites[site])
        lam = self.get(site, "lam") if self.form.learnable else self.form.lam
        self.h = self.h + lam / (repeats * math.sqrt(len(set(self.sites)))) * u


REFERENCES = {
    "standard": Plain,
    "delta": Delta,
    "attention_residual": AttnRes,
    "multi_gate": Gates,
    "review": Reviewed,
    "highway": High,
    "scaled_loop": Scaled,
}
