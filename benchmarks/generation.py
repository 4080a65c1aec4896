"""What a form costs in generation: `python benchmarks/generation.py [--layers N] [--width D] [--tokens T] [--out FILE] [FORM ...]`.

A random Llama with a static cache makes one token at a time, batch 1, compiled by Inductor, on the CPU: plain under torch.compile, and
attached in the live mode. The models take turns token by token in one process, and the medians of processor time are compared, so
that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from reporting import put_section, table
from rich.console import Console
from rich.table import Table

import resfx

FORMS = (
    "delta",
    "delta(granularity=block, block_size=4)",
    "attention_residual",
    "multi_gate",
    "review",
    "highway",
    "scaled_loop",
)
HEADER = ["form", "ms a token", "over plain"]
WARM = 8


def model_of(layers: int, width: int) -> Any:
    """A decoder with random weights, in eval mode."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        vocab_size=1024,
        max_position_embeddings=512,
    )
    return transformers.LlamaForCausalLM(config).eval()


class Steps:
    """`step()` makes the next token; seconds of processor time are kept for each."""

    def __init__(self, call: Any, config: Any, tokens: int) -> None:
        self.call = call
        self.cache = transformers.StaticCache(config=config, max_cache_len=tokens + 1)
        self.token, self.position = torch.ones(1, 1, dtype=torch.int64), 0
        self.seconds: list[float] = []

    def step(self) -> None:
        position = torch.full((1, 1), self.position)
        start = time.process_time()
        logits = self.call(input_ids=self.token, position_ids=position, past_key_values=self.cache).logits
        self.seconds.append(time.process_time() - start)
        self.token = logits[:, -1].argmax(-1, keepdim=True)
        self.position += 1

    @property
    def milliseconds(self) -> float:
        """The median, without the first tokens, which compile."""
        return 1e3 * statistics.median(self.seconds[WARM:])


def attached(form: resfx.Form, layers: int, width: int) -> Any:
    """The same decoder with its streams rewritten, the new parameters perturbed."""
    model = model_of(layers, width)
    example = {"input_ids": torch.ones(1, 4, dtype=torch.int64), "position_ids": torch.arange(4)[None]}
    resfx.attach(model, form, (), example)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("residual."):
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def measure(forms: list[str], layers: int, width: int, tokens: int) -> list[list[str]]:
    """Rows of the table: milliseconds per token and the ratio to the plain model."""
    plain = model_of(layers, width)
    runs = {"plain": Steps(torch.compile(plain), plain.config, tokens)}
    for text in forms:
        runs[text] = Steps(attached(resfx.passes.from_spec(text), layers, width), plain.config, tokens)
    with torch.no_grad():
        for _ in range(tokens):
            for run in runs.values():
                run.step()
    plain_one = runs["plain"].milliseconds
    return [[name, f"{run.milliseconds:.2f}", f"{run.milliseconds / plain_one:.3f}"] for name, run in runs.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("forms", nargs="*", default=list(FORMS))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, help="the file whose section is written; none if it isn't given")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.forms, options.layers, options.width, options.tokens)
    of = f"{options.layers} layers of width {options.width}, {options.tokens} tokens"
    shown = Table(*HEADER, title=of)
    for row in rows:
        shown.add_row(*row)
    Console(width=100).print(shown)
    if options.out is not None:
        text = f"A random Llama, {of}, static cache, batch 1, compiled by Inductor, one thread; processor time.\n\n{table(HEADER, rows)}"
        put_section(options.out, "Generation in the live mode", "python benchmarks/generation.py", text)


if __name__ == "__main__":
    main()
