"""A model attached and the same model rewritten, with the same perturbed parameters: what both must agree on."""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import resfx

CASES = Path(__file__).parent.parent / "cases"


def case(path: Path) -> ModuleType:
    """The module of a small model of `tests/cases`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dynamo of torch 2.11 looks a function's globals up there
    spec.loader.exec_module(module)
    return module


def example(module: ModuleType) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example call of a case."""
    return (module.inputs(), {}) if hasattr(module, "inputs") else ((), module.kwargs())


def perturb(model: nn.Module, seed: int = 3, std: float = 1.0) -> list[nn.Parameter]:
    """Random numbers in every new parameter; returns them."""
    generator = torch.Generator().manual_seed(seed)
    found = [p for name, p in model.named_parameters() if name.startswith("residual.")]
    with torch.no_grad():
        for parameter in found:
            parameter.add_(std * torch.randn(parameter.shape, generator=generator))
    return found


class Pair:
    """`live` is attached, `static` rewritten, `plain` neither; the new parameters are perturbed alike."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        form: resfx.Form,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        backend: Any = "eager",
        std: float = 1.0,
        **options: Any,
    ) -> None:
        torch._dynamo.reset()
        self.plain, self.live = make(), make()
        self.static = resfx.rewrite(make(), form, copy.deepcopy(args), copy.deepcopy(kwargs), **options)
        resfx.attach(self.live, form, copy.deepcopy(args), copy.deepcopy(kwargs), backend=backend, **options)
        assert list(self.live.state_dict()) == list(self.static.state_dict())
        start = {name: value for name, value in self.static.state_dict().items() if name.startswith("residual.")}
        assert all(torch.equal(value, self.live.state_dict()[name]) for name, value in start.items())
        perturb(self.live, std=std)
        self.static.load_state_dict(self.live.state_dict())

    def outputs(self, *args: Any, **kwargs: Any) -> Iterator[list[torch.Tensor]]:
        """The floating outputs of live, static and plain for one call; each gets inputs of its own."""
        for model in (self.live, self.static, self.plain):
            given = copy.deepcopy((args, kwargs))
            yield floats(model(*given[0], **given[1]))

    def assert_same(self, *args: Any, gradients: bool = True, tolerance: float = 1e-5, **kwargs: Any) -> None:
        """Live and static agree on outputs and gradients, and both differ from plain."""
        live, static, plain = self.outputs(*args, **kwargs)
        assert_close(live, static, tolerance)
        assert worst(live, plain) > 1e-3, "the new parameters change nothing"
        if gradients:
            loss(live).backward()
            loss(static).backward()
            own = dict(self.live.named_parameters())
            other = dict(self.static.named_parameters())
            for name in own:
                mine, theirs = own[name].grad, other[name].grad
                assert (mine is None) == (theirs is None), name
                if mine is not None and theirs is not None:
                    assert_close([mine], [theirs], tolerance)
            self.live.zero_grad()
            self.static.zero_grad()


def floats(result: Any) -> list[torch.Tensor]:
    """The floating tensors of a model's output."""
    return [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_floating_point()]


def loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    """A scalar that depends on every output."""
    return sum((x.float() * torch.arange(1, x.numel() + 1).view(x.shape).cos()).sum() for x in outputs)  # type: ignore[return-value]


def worst(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest relative difference."""
    pairs = zip(mine, theirs, strict=True)
    return max(float(((a - b).abs().max() / b.abs().max().clamp(min=1e-6)).detach()) for a, b in pairs)


def assert_close(mine: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    assert mine, "nothing to compare"
    assert [x.shape for x in mine] == [x.shape for x in theirs]
    assert [x.dtype for x in mine] == [x.dtype for x in theirs]
    assert worst([x.detach().double() for x in mine], [x.detach().double() for x in theirs]) <= tolerance


def run_two_processes(script: str, folder: Path, *arguments: str) -> None:
    """`script RANK FOLDER *arguments` as the two processes of one gloo group."""
    commands = [[sys.executable, script, str(rank), str(folder), *arguments] for rank in range(2)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    for process in running:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors[-3000:]
