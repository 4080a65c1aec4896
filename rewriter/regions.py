"""Regions (no_grad, autocast, checkpoint) arrive as subgraphs behind higher-order ops; here they are inlined.

torch.cond, scan and while_loop keep their subgraphs: those run conditionally or repeatedly.
"""

from __future__ import annotations

import copy
import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from resfx.passes.autocast import ENTER, EXIT
from resfx.root import take_over
from resfx.tracepoints import is_tracepoint

# Marks the nodes that came out of a no_grad region.
NO_GRAD = "resfx_no_grad"
# The number of the region a node came from; absent at the top level.
REGION = "resfx_region"

Origin = dict[tuple[int, str], fx.Node]


def inline_regions(
    module: fx.GraphModule, bodies: list[str], origin: Origin, parents: dict[int, int], notes: list[str]
) -> None:
    """Replace every inlinable region of `module.graph` by its nodes, nested ones too.

    `bodies` names the attributes that hold the subgraphs; those nobody calls any more go. `origin` learns where each
    region's nodes went, `parents` which region contains which (0 is the top level).
    """
    detached: dict[fx.Node, fx.Node] = {}
    frozen: set[int] = set()
    found = True
    while found:
        found = False
        for node in list(module.graph.nodes):
            region = _region(module, node)
            if region is None:
                continue
            inliner = _Inliner(module, node, region, origin, parents, notes, bodies)
            inliner.run()
            detached.update(inliner.detached)
            if inliner.no_grad:
                frozen.add(inliner.number)
            found = True
    _restore_outside(detached, frozen, origin)
    _call_functions_themselves(module)
    _drop_unused(module, bodies)
    module.recompile()


class _Region:
    """One call of a region op: its body, its operands, and what its borders do."""

    def __init__(self, kind: str, body: fx.GraphModule, operands: tuple[Any, ...], setting: tuple[Any, ...]) -> None:
        self.kind, self.body, self.operands, self.setting = kind, body, operands, setting


def _op(node: fx.Node) -> str:
    """The name of the higher-order op that the node calls, or ""."""
    target = node.target
    return str(target.name()) if isinstance(target, torch._ops.HigherOrderOperator) else ""  # type: ignore[no-untyped-call]


def _region(module: fx.GraphModule, node: fx.Node) -> _Region | None:
    name = _op(node)
    if name == "wrap_with_set_grad_enabled":
        enabled, body, *operands = node.args
        return _Region("grad" if enabled else "no_grad", _body(module, body), tuple(operands), (enabled,))
    if name == "wrap_with_autocast":
        device, dtype, enabled, cache, body, *operands = node.args
        return _Region("autocast", _body(module, body), tuple(operands), (device, dtype, enabled, cache))
    if name in ("tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap"):
        body, *operands = node.args
        return _Region("checkpoint", _body(module, body), tuple(operands), ())
    return None


def _body(module: fx.GraphModule, node: Any) -> fx.GraphModule:
    value: Any = module.get_submodule(str(node.target))
    assert isinstance(value, fx.GraphModule)
    return value


class _Inliner:
    def __init__(
        self,
        module: fx.GraphModule,
        node: fx.Node,
        region: _Region,
        origin: Origin,
        parents: dict[int, int],
        notes: list[str],
        bodies: list[str],
    ) -> None:
        self.module, self.graph, self.node, self.region = module, module.graph, node, region
        self.origin, self.notes, self.bodies = origin, notes, bodies
        self.number = len(parents) + 1
        parents[self.number] = int(node.meta.get(REGION, 0))
        inherited = bool(node.meta.get(NO_GRAD)) and region.kind != "grad"
        self.no_grad = region.kind == "no_grad" or inherited
        self.detached: dict[fx.Node, fx.Node] = {}  # detached input -> the input

    def run(self) -> None:
        with self.graph.inserting_before(self.node):
            enter = self._enter()
            env = self._operands()
            results = self._copy(env)
            self._leave(enter)
        self._replace(results)
        self._note()

    def _enter(self) -> fx.Node | None:
        if self.region.kind != "autocast":
            return None
        new = self.graph.call_function(ENTER, self.region.setting)
        new.meta = self._border_meta()
        return new

    def _leave(self, enter: fx.Node | None) -> None:
        if enter is None:
            return
        new = self.graph.call_function(EXIT, (enter,))
        new.meta = self._border_meta()

    def _border_meta(self) -> dict[str, Any]:
        meta: dict[str, Any] = {k: v for k, v in self.node.meta.items() if k in ("nn_module_stack", "stack_trace")}
        inner = next((n for n in self.region.body.graph.nodes if n.op == "call_function"), None)
        if inner is not None and "stack_trace" in inner.meta:
            meta.setdefault("stack_trace", inner.meta["stack_trace"])
        meta[REGION] = self.number
        return meta

    def _operands(self) -> dict[fx.Node, Any]:
        placeholders = [n for n in self.region.body.graph.nodes if n.op == "placeholder"]
        env: dict[fx.Node, Any] = {}
        for placeholder, operand in zip(placeholders, self.region.operands, strict=True):
            value = self._detached(operand, placeholder) if self.region.kind == "no_grad" else operand
            env[placeholder] = value
            if isinstance(value, fx.Node):
                self.origin[(self.number, placeholder.name)] = value
        return env

    def _detached(self, operand: Any, placeholder: fx.Node) -> Any:
        """Inside no_grad nothing records gradients: with every input detached, nothing does outside of it either."""
        value = placeholder.meta.get("val")
        if not isinstance(operand, fx.Node) or not isinstance(value, torch.Tensor) or not _differentiable(value):
            return operand
        if operand.meta.get(NO_GRAD):
            return operand
        new = self.graph.call_function(torch.ops.aten.detach.default, (operand,))
        new.meta = {key: value for key, value in operand.meta.items() if key in ("val", "tensor_meta", "stack_trace")}
        new.meta["nn_module_stack"] = self.node.meta.get("nn_module_stack", {})
        new.meta[NO_GRAD] = True
        self.detached[new] = operand
        return new

    def _copy(self, env: dict[fx.Node, Any]) -> tuple[Any, ...]:
        body = self.region.body
        for old in body.graph.nodes:
            if old.op == "placeholder":
                continue
            if old.op == "output":
                return tuple(fx.map_arg(old.args[0], lambda n: env[n]))
            new = self._attribute(old) if old.op == "get_attr" else self.graph.node_copy(old, lambda n: env[n])
            new.meta[REGION] = self.number
            if self.no_grad:
                new.meta[NO_GRAD] = True
            env[old] = new
            self.origin[(self.number, old.name)] = new
        return ()

    def _attribute(self, old: fx.Node) -> fx.Node:
        target = str(old.target)
        name = take_over(self.module, self.region.body, target, f"{self.node.name}_{target}")
        self.bodies.append(name)
        new = self.graph.get_attr(name)
        new.meta = copy.copy(old.meta)
        return new

    def _replace(self, results: tuple[Any, ...]) -> None:
        for user in list(self.node.users):
            if user.target is operator.getitem and isinstance(user.args[1], int):
                value = results[user.args[1]]
                if isinstance(value, fx.Node):
                    user.replace_all_uses_with(value)
                    self._rename(user, value)
                    self.graph.erase_node(user)
        if self.node.users:
            self.node.replace_all_uses_with(results[0])
        for key, value in list(self.origin.items()):
            if value is self.node:
                del self.origin[key]
        self.graph.erase_node(self.node)

    def _rename(self, old: fx.Node, new: fx.Node) -> None:
        for key, value in self.origin.items():
            if value is old:
                self.origin[key] = new

    def _note(self) -> None:
        text = {
            "no_grad": "a no_grad region was inlined; its inputs are detached",
            "autocast": f"an autocast region {self.region.setting[:2]} was inlined between its enter and exit calls",
            "checkpoint": "a checkpointed region was inlined; its recomputation is not kept",
        }.get(self.region.kind)
        if text is not None and text not in self.notes:
            self.notes.append(text)


def _restore_outside(detached: dict[fx.Node, fx.Node], frozen: set[int], origin: Origin) -> None:
    """What a no_grad region only hands through keeps its gradients: outside of it the input itself is read.

    The export hands inputs through where a call inside was marked by tracepoints.
    """
    for new, operand in detached.items():
        for value in _handed_through(new):
            value.replace_all_uses_with(operand, delete_user_cb=lambda user: not user.meta.get(NO_GRAD))
            for key, node in origin.items():
                if node is value and key[0] not in frozen:
                    origin[key] = operand


def _handed_through(value: fx.Node) -> list[fx.Node]:
    """`value` and what tracepoints of its own region return in its place."""
    found = [value]
    for node in found:
        for point in node.users:
            if is_tracepoint(point) and point.meta.get(NO_GRAD):
                positions = {i for i, argument in enumerate(point.args) if argument is node}
                found.extend(u for u in point.users if u.target is operator.getitem and u.args[1] in positions)
    return found


def _differentiable(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _call_functions_themselves(module: fx.GraphModule) -> None:
    """`flat_apply(f, spec, *leaves)`, as an autograd.Function arrives, becomes `f(*args, **kwargs)`.

    It reads `f` and `spec` from attributes that are no tensors and no modules: a result would not have them.
    """
    for node in module.graph.nodes:
        if _op(node) == "flat_apply":
            function, spec = (operator.attrgetter(str(source.target))(module) for source in node.args[:2])
            node.target = pytree.tree_unflatten([], function).func
            node.args, node.kwargs = pytree.tree_unflatten(node.args[2:], spec)


def _drop_unused(module: fx.GraphModule, bodies: list[str]) -> None:
    """Subgraphs were attached for the time of inlining; those nobody calls any more go."""
    for node in reversed(list(module.graph.nodes)):
        if node.op == "get_attr" and node.target in bodies and not node.users:
            module.graph.erase_node(node)
    used = {str(node.target) for node in module.graph.nodes if node.op == "get_attr"}
    for name in bodies:
        if name not in used:
            delattr(module, name)
