"""`resfx demo`: the whole way on a small GPT, without network or extras.

Find its residuals, rewrite them to Delta attention, prove that the result is right, compile it, export it to ONNX and
run that in ONNX Runtime.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import resfx
import resfx.export
from resfx.passes.form import Form
from resfx.patterns.errors import ResfxError
from resfx.patterns.report import ResidualMap

Step = Callable[[str], AbstractContextManager[None]]

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS = 256, 64, 128, 4, 2


class DemoFailed(ResfxError):
    """A number of the demo is not what it must be."""


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm: two residual updates of the stream x [B, T, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """tokens int64 [B, T] -> logits float32 [B, T, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def example() -> tuple[GPT, tuple[Tensor]]:
    """The demo's model and one batch of tokens; seed torch first for the same numbers."""
    return GPT().eval(), (torch.randint(0, VOCABULARY, (4, CONTEXT)),)


@dataclass(frozen=True)
class DemoResult:
    """What the closing table shows. Differences are the largest |a - b| over the largest |a|."""

    found: ResidualMap
    sites: int
    rewritten: int
    parameters_before: int
    parameters_added: int
    difference_at_init: float
    smallest_effect: float
    compiled: str  # "torch.compile", or why it was left out
    difference_compiled: float | None
    milliseconds_before: float
    milliseconds_after: float
    onnx_bytes: int
    onnx_runs: list[str]
    onnx_difference: float  # the largest |a - b| of all runs

    def rows(self) -> dict[str, str]:
        """The closing table."""
        compiled = "" if self.difference_compiled is None else f", differs from eager by {self.difference_compiled:.1e}"
        how = "eager" if self.difference_compiled is None else "compiled"
        return {
            "residual sites": f"{self.rewritten} of {self.sites} rewritten to delta",
            "parameters": f"{self.parameters_before:,} + {self.parameters_added:,} new",
            "max difference at the start": f"{self.difference_at_init:.1e}",
            "weakest new parameter moves the output by": f"{self.smallest_effect:.1e}",
            "compile": self.compiled + compiled,
            "milliseconds, plain -> rewritten": f"{self.milliseconds_before:.2f} -> {self.milliseconds_after:.2f}"
            f" ({how}, on this CPU; at this size mostly the overhead of calls: no measure of a real model)",
            "ONNX": f"{self.onnx_bytes / 1e6:.1f} MB, in ONNX Runtime off by at most {self.onnx_difference:.1e}",
            "ONNX runs": "; ".join(self.onnx_runs),
        }


def run_demo(form: Form, step: Step) -> DemoResult:
    """Every step of the demo, each inside `step(title)`. Raises a ResfxError where one goes wrong."""
    model, args = example()
    with torch.no_grad():
        before = model(*args)
    with step("find: capture the model and search its graph"):
        found = resfx.find(model, args)
    sites = found.sites
    with step("rewrite: every x + f(x) becomes Delta attention"):
        result = resfx.rewrite(model, form, args)
    with step("verify: same function at the start, every new parameter at work"):
        difference = _same_at_init(before, result, args)
        effect = _smallest_effect(result, args)
    reason = _no_compiler()
    compiled_difference = None
    plain: nn.Module = model
    fast: nn.Module = result
    if reason is None:
        with step("compile: torch.compile, plain and rewritten"):
            plain, fast = resfx.export.compile(model), resfx.export.compile(result)
            compiled_difference = _same_compiled(plain, fast, model, result, args)
    with step("time: plain and rewritten"):
        milliseconds = _milliseconds(plain, args), _milliseconds(fast, args)
    with step("export: ONNX, checked in ONNX Runtime"), tempfile.TemporaryDirectory() as folder:
        report = resfx.export.to_onnx(result, Path(folder) / "gpt.onnx", args)
    added = [parameter for name, parameter in result.named_parameters() if name.startswith("residual.")]
    return DemoResult(
        found=found,
        sites=len(sites),
        rewritten=sum(site.rewritable for site in sites),
        parameters_before=sum(parameter.numel() for parameter in model.parameters()),
        parameters_added=sum(parameter.numel() for parameter in added),
        difference_at_init=difference,
        smallest_effect=effect,
        compiled=reason or "torch.compile",
        difference_compiled=compiled_difference,
        milliseconds_before=milliseconds[0],
        milliseconds_after=milliseconds[1],
        onnx_bytes=report.bytes,
        onnx_runs=[f"{check.batch}, optimisations {check.optimisations}" for check in report.checks],
        onnx_difference=max(check.largest for check in report.checks),
    )


def difference(expected: Tensor, actual: Tensor) -> float:
    """Largest |expected - actual| over the largest |expected|."""
    return float((expected - actual).abs().max() / expected.abs().max())


def _same_at_init(before: Tensor, result: nn.Module, args: tuple[Tensor]) -> float:
    with torch.no_grad():
        found = difference(before, result(*args))
    # Delta starts as a multiple of the plain state; the next norm removes the factor up to its eps of 1e-5.
    if not found < 1e-4:
        raise DemoFailed(f"The rewritten model differs from the plain one at the start, by {found:.1e}.")
    return found


def _smallest_effect(result: nn.Module, args: tuple[Tensor]) -> float:
    """The smallest change of the output that any one new parameter causes; 0 would mean a dead parameter."""
    new = {name: p for name, p in result.named_parameters() if name.startswith("residual.")}
    start = {name: parameter.detach().clone() for name, parameter in new.items()}
    effects = {}
    with torch.no_grad():
        # Away from the start first: at query = 0 the key norm has no effect.
        for parameter in new.values():
            parameter.add_(torch.randn_like(parameter) * 0.3)
        moved = result(*args)
        for name, parameter in new.items():
            kept = parameter.clone()
            parameter.add_(torch.randn_like(parameter) * 0.3)
            effects[name] = difference(moved, result(*args))
            parameter.copy_(kept)
        for name, parameter in new.items():
            parameter.copy_(start[name])
    weakest = min(effects, key=lambda name: effects[name])
    if not effects[weakest] > 1e-4:
        raise DemoFailed(f"The new parameter {weakest} has no effect on the output ({effects[weakest]:.1e}).")
    return effects[weakest]


def _same_compiled(
    plain: nn.Module, fast: nn.Module, model: nn.Module, result: nn.Module, args: tuple[Tensor]
) -> float:
    with torch.no_grad():
        found = max(difference(model(*args), plain(*args)), difference(result(*args), fast(*args)))
    if not found < 1e-4:
        raise DemoFailed(f"The compiled model differs from the eager one, by {found:.1e}.")
    return found


def _milliseconds(model: nn.Module, args: tuple[Tensor]) -> float:
    """Median time of one forward pass, after three to warm up."""
    times = []
    with torch.no_grad():
        for _ in range(23):
            start = time.perf_counter()
            model(*args)
            times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[3:])


def _no_compiler() -> str | None:
    """Why torch.compile can't build CPU code here, or None: it needs a C++ compiler and Python's headers."""
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return f"left out: torch.compile needs a C++ compiler, and there is no {compiler}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "left out: torch.compile needs Python's headers (python3-dev)"
    return None
