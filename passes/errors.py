"""What can go wrong while a stream is rewritten, and the value that says a stream can't be."""

from __future__ import annotations

from dataclasses import dataclass

from resfx.patterns.errors import ResfxError


class FormError(ResfxError):
    """An unknown form, or an unknown, ill-typed or contradictory option of one."""


class EditError(ResfxError):
    """The graph can't be edited as asked: it lacks what every captured graph carries."""


class CheckError(ResfxError):
    """A rewritten graph broke a rule. `rule` is its name, `node` the guilty node's."""

    def __init__(self, rule: str, node: str, detail: str) -> None:
        super().__init__(f"rule {rule} broken at {node}: {detail}; this is a fault of the rewrite, please report it")
        self.rule = rule
        self.node = node


@dataclass(frozen=True)
class Refusal:
    """A stream that stays as it is. Falsy, so that `if applied:` reads naturally."""

    stream: int
    form: str
    reason: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"stream {self.stream} can't take {self.form}: {self.reason}"
