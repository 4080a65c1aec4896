"""Python keywords as names of submodules: `nn.ModuleDict({"class": ..})` and the like."""

from __future__ import annotations

import functools
from keyword import iskeyword

import torch.fx.graph
from torch import nn


def speak_keywords(model: nn.Module) -> None:
    """Where `model` has such names: let torch.fx write `getattr(self.table, 'class')` from here on, not `self.table.class`.

    That is a syntax error, which stops every graph that names the module, torch.export's own included. The function that
    writes names is private. It stays replaced, for the result will be exported and copied again; other names are written as before.
    """
    paths = [path for path, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())]
    if any(iskeyword(name) for path in paths for name in path.split(".")):
        _replace()


@functools.cache
def _replace() -> None:
    plain = torch.fx.graph._format_target

    def format_target(base: str, target: str) -> str:
        for name in target.split("."):
            base = f"getattr({base}, {name!r})" if iskeyword(name) else plain(base, name)
        return base

    torch.fx.graph._format_target = format_target
