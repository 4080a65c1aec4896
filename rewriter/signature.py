"""The calling convention of a captured model: the user's own arguments in, the user's own output type out.

The arguments of one call are described by a template per parameter of `forward`: which leaf is a tensor input of the
graph, which is a constant that was baked in. Everything here is plain Python on shapes and constants, so that Dynamo
and torch.export trace through it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from resfx.capture_errors import GuardError
from resfx.guards import Guards


@dataclass(frozen=True)
class TensorSlot:
    """A tensor that is input number `index` of the graph; `None` where the graph doesn't read it."""

    index: int
    label: str


@dataclass(frozen=True)
class Constant:
    """A value that was baked into the graph; `same` are other values that mean the same."""

    value: Any
    label: str
    same: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Items:
    """A list, tuple or dict of known length; `keys` is None for sequences."""

    children: tuple[Template, ...]
    label: str
    keys: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Tree:
    """Any other registered pytree container."""

    spec: pytree.TreeSpec
    children: tuple[Template, ...]
    label: str


Template: TypeAlias = TensorSlot | Constant | Items | Tree


def _is_constant(template: Template) -> bool:
    if isinstance(template, (TensorSlot,)):
        return False
    if isinstance(template, Constant):
        return True
    return all(_is_constant(child) for child in template.children)


def build_template(value: Any, label: str, tensors: list[torch.Tensor]) -> Template:
    """Describe `value`; every tensor met is appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return TensorSlot(len(tensors) - 1, label)
    if type(value) in (list, tuple):
        children = tuple(build_template(item, f"{label}[{i}]", tensors) for i, item in enumerate(value))
        return Items(children, label)
    if type(value) is dict:
        children = tuple(build_template(item, f"{label}[{key!r}]", tensors) for key, item in value.items())
        return Items(children, label, tuple(value))
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        return Constant(value, label)
    children = tuple(build_template(leaf, f"{label}.{i}", tensors) for i, leaf in enumerate(leaves))
    return Tree(spec, children, label)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return f"a {type(value).__name__}"


def _same(left: Any, right: Any) -> bool:
    if left is right:
        return True
    if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
        return False
    return type(left) is type(right) and bool(left == right)


@dataclass(frozen=True, eq=False)
class CallSignature:
    """How to call a captured graph like the model it came from.

    `parameters` is the signature of the model's `forward` (without self); `templates` has one entry per parameter.
    `hints` maps an argument name to a sentence that is added to its guard error.
    """

    parameters: inspect.Signature
    templates: tuple[Template, ...]
    n_inputs: int
    out_spec: pytree.TreeSpec
    guards: Guards
    hints: Mapping[str, str] = field(default_factory=dict)

    def inputs(self, values: tuple[Any, ...], model: torch.nn.Module | None = None) -> list[torch.Tensor]:
        """The graph's inputs from one value per parameter; after `model.to(dtype)` they may have its new dtype.

        Raises GuardError where a value differs from what was captured: a size, a dtype, a constant, a missing tensor.
        """
        found: list[Any] = [None] * self.n_inputs
        for template, value in zip(self.templates, values, strict=True):
            self._match(template, value, found)
        self.guards.check(found, model)
        return found

    def output(self, flat: tuple[Any, ...]) -> Any:
        """The user's own output type from the flat outputs of the graph."""
        return pytree.tree_unflatten(flat, self.out_spec)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """One value per parameter of `forward`, defaults filled in."""
        bound = self.parameters.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[name] for name in self.parameters.parameters)

    def _match(self, template: Template, value: Any, found: list[Any]) -> None:
        if isinstance(template, TensorSlot):
            if not isinstance(value, torch.Tensor):
                self._fail(template.label, "a tensor", value)
            found[template.index] = value
            return
        if isinstance(template, Constant):
            if _same(template.value, value):
                return
            for other in template.same:
                if _same(other, value):
                    return
            self._fail(template.label, _describe(template.value), value)
        if isinstance(template, Items):
            self._match_items(template, value, found)
            return
        if isinstance(template, Tree):
            leaves, spec = pytree.tree_flatten(value)
            if spec != template.spec:
                self._fail(template.label, f"a {template.spec.type}", value)
            for child, leaf in zip(template.children, leaves, strict=True):
                self._match(child, leaf, found)

    def _match_items(self, template: Items, value: Any, found: list[Any]) -> None:
        if template.keys is None:
            if not isinstance(value, (list, tuple)) or len(value) != len(template.children):
                self._fail(template.label, f"a sequence of {len(template.children)}", value)
            for child, item in zip(template.children, value, strict=True):
                self._match(child, item, found)
            return
        if not isinstance(value, dict):
            self._fail(template.label, f"a dict with the keys {list(template.keys)}", value)
        for key, child in zip(template.keys, template.children, strict=True):
            # A keyword that was a constant at capture and is left out now counts as None.
            if key not in value and not _is_constant(child):
                self._fail(child.label, "a tensor", None)
            self._match(child, value.get(key, child.value if isinstance(child, Constant) else None), found)
        for key in value:
            if key not in template.keys and value[key] is not None:
                self._fail(f"{template.label}[{key!r}]", "absent", value[key])

    def _fail(self, label: str, captured: str, value: Any) -> None:
        hint = self.hints.get(label, "")
        raise GuardError(
            f"argument `{label}`: was {captured} at capture, now it is {_describe(value)}."
            f" Rewrite again with this argument as an example.{' ' + hint if hint else ''}"
        )


def forward_signature(model: torch.nn.Module) -> inspect.Signature:
    """The signature of the model's forward, without self; annotations dropped (they may not be evaluable)."""
    forward: Callable[..., Any] = model.forward
    signature = inspect.signature(forward)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return inspect.Signature(plain)


def input_templates(
    parameters: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Template, ...], list[torch.Tensor]]:
    """One template per parameter of `forward`, and the tensors in the order of their slots."""
    bound = parameters.bind(*args, **kwargs)
    bound.apply_defaults()
    tensors: list[torch.Tensor] = []
    templates: list[Template] = []
    for name, parameter in parameters.parameters.items():
        value = bound.arguments[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            children = tuple(build_template(item, key, tensors) for key, item in value.items())
            templates.append(Items(children, name, tuple(value)))
            continue
        templates.append(build_template(value, name, tensors))
    return tuple(templates), tensors


def slot_labels(templates: Sequence[Template], count: int) -> list[str]:
    """The label of every tensor slot, in order."""
    labels = [""] * count

    def visit(template: Template) -> None:
        if isinstance(template, TensorSlot):
            labels[template.index] = template.label
        elif not isinstance(template, Constant):
            for child in template.children:
                visit(child)

    for template in templates:
        visit(template)
    return labels
