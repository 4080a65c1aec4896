"""What `benchmarks/training.py` trains: a character GPT on the Python files of the standard library, the same for every form."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import resfx

VOCABULARY = 128  # ASCII
CONTEXT, BATCH = 64, 16
WIDTH, HEADS = 64, 4
WARMUP = 20
HELD_OUT = 10  # every tenth file is for validation
VALIDATION_BATCHES = 16


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return out


class Block(nn.Module):
    """Pre-norm: two residual updates."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class CharacterGPT(nn.Module):
    """tokens int64 [B, T] -> logits float32 [B, T, VOCABULARY]."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)  # GPT-2's: torch's own 1.0 would drown the updates

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclass(frozen=True)
class Corpus:
    """Characters as int64 [n]: those to train on, and those of other files to validate on."""

    training: Tensor
    validation: Tensor


def standard_library() -> Corpus:
    """The top-level modules of the running Python's standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore") for path in files]
    held = b"".join(texts[::HELD_OUT])
    kept = b"".join(text for number, text in enumerate(texts) if number % HELD_OUT)
    return Corpus(*(torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in (kept, held)))


def batches(characters: Tensor, count: int, seed: int) -> list[Tensor]:
    """`count` batches [BATCH, CONTEXT + 1] at random places, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(len(characters) - CONTEXT - 1, (count, BATCH), generator=generator)
    return [torch.stack([characters[p : p + CONTEXT + 1] for p in row]) for row in places.tolist()]


@dataclass(frozen=True)
class Trained:
    """A model after its steps: `losses` are those of every step, `validation` the mean loss over held-out batches."""

    model: nn.Module
    losses: list[float]
    validation: float


def train(form: resfx.Form, corpus: Corpus, *, layers: int, steps: int, lr: float, seed: int) -> Trained:
    """Train the model of `seed` under `form`. Seed, steps and batches are all that a run depends on, beside the form."""
    torch.manual_seed(seed)
    example = (corpus.training[: BATCH * CONTEXT].reshape(BATCH, CONTEXT),)
    model = resfx.rewrite(CharacterGPT(layers), form, example).train()
    optimizer = torch.optim.AdamW(resfx.parameter_groups(model, lr=lr), betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    losses = []
    for batch in batches(corpus.training, steps, seed):
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        schedule.step()
        losses.append(value.item())
    model.eval()
    with torch.no_grad():
        held = [loss(model, batch).item() for batch in batches(corpus.validation, VALIDATION_BATCHES, 0)]
    return Trained(model, losses, sum(held) / len(held))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Cross entropy in nats per character."""
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def readings(trained: Trained, corpus: Corpus) -> tuple[resfx.SiteReading, ...]:
    """What `resfx.measure` reads at every site, over one held-out batch."""
    batch = batches(corpus.validation, 1, 1)[0]
    return resfx.measure(trained.model, (batch[:, :-1],)).of_stream(0)
