"""Why a sum is no site: a refusal is a value, not a silence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch.fx import Node

from resfx.patterns.dialect import module_path, source_of

Stage: TypeAlias = Literal["structure", "learned", "shape", "order"]


@dataclass(frozen=True)
class Rejected:
    """A near miss. `template` and `details` make the reason; it is formatted only when read."""

    node: Node
    stage: Stage
    template: str
    details: tuple[Node | str | int, ...] = ()

    def __bool__(self) -> bool:
        return False

    @property
    def reason(self) -> str:
        return self.template.format(*(d.name if isinstance(d, Node) else d for d in self.details))

    @property
    def path(self) -> str:
        return module_path(self.node)

    @property
    def source(self) -> str:
        return source_of(self.node)
