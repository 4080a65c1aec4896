"""The `torch.fx` route: symbolic tracing through every module, in the dialect of torch functions and methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from resfx import libraries
from resfx.caches import cache_notes
from resfx.calling import CallCodeGen
from resfx.captured import Captured, Mode, ModuleCall
from resfx.dynamic import Attempt, canonical_call
from resfx.environment import capturing
from resfx.equal_reads import merge_equal_reads
from resfx.export_route import remove_dead
from resfx.failure import capture_failure, without_own_frames
from resfx.functionalize import functionalize
from resfx.guards import Guards, TensorGuard, parameter_dtypes
from resfx.indexed_adds import spell_out_indexed_adds
from resfx.module_calls import refreshed
from resfx.root import add_constant, graft, graph_target
from resfx.signature import CallSignature, forward_signature, input_templates, slot_labels
from resfx.twins import fake_result

FX_NOTE = "the fx frontend does not see no_grad and autocast regions: the result runs their operations plainly"
_MODEL = "_model"


def fx_flat(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], mode: Mode) -> Captured:
    """Trace in `mode`; `calls` of the result holds every module call. Raises CaptureError."""
    parameters = forward_signature(model)
    seen: list[str] = []
    try:
        args, kwargs = canonical_call(parameters, args, kwargs)
        with capturing(model, mode, seen), libraries.without_cache(model) as uncached:
            captured = _trace(model, args, kwargs, parameters, mode)
    except Exception as error:
        raise capture_failure(error, model, "fx") from error
    captured.notes.append(FX_NOTE)
    if uncached:
        captured.notes.extend(cache_notes(model, args, kwargs, mode))
    return captured


class _KnownProxy(fx.Proxy):
    """A proxy whose rank, dtype and device are known; its sizes stay symbolic."""

    def dim(self) -> Any:
        if _is_tensor(self):
            return self.node.meta["val"].dim()
        return self.tracer.create_proxy("call_method", "dim", (self,), {})

    def _known(self, name: str) -> Any:
        return getattr(self.node.meta["val"], name) if _is_tensor(self) else fx.proxy.Attribute(self, name)

    @property
    def ndim(self) -> Any:
        return self._known("ndim")

    @property
    def dtype(self) -> Any:
        return self._known("dtype")

    @property
    def device(self) -> Any:
        return self._known("device")


def _is_tensor(proxy: fx.Proxy) -> bool:
    return isinstance(proxy.node.meta.get("val"), torch.Tensor)


class _Tracer(fx.Tracer):
    """Inlines every module, records each call, and computes every node's fake value on the way.

    `self.root` holds the model under `_model`; paths leave that out.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.inputs = iter(tensors)
        self.record_stack_traces = True
        self.calls: list[ModuleCall] = []
        self.counts: dict[str, int] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _KnownProxy(node, self)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if "stack_trace" in node.meta:
            node.meta["stack_trace"] = without_own_frames(node.meta["stack_trace"])
        value = self._value(node)
        if value is not None:
            node.meta["val"] = value
        return node

    def _value(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.mode.from_tensor(next(self.inputs))
        if node.op == "get_attr":
            value = _raw_attribute(self.root, str(node.target))
            return self.mode.from_tensor(value) if isinstance(value, torch.Tensor) else None
        if node.op not in ("call_function", "call_method"):
            return None
        try:
            return fake_result(node, self.mode)
        except Exception:
            # Without a value the node is opaque: no site is found on it, nothing is guessed.
            return None

    def path_of_module(self, mod: nn.Module) -> str:
        return strip(super().path_of_module(mod))

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        path = self.path_of_module(m)
        index = self.counts.get(path, 0)
        self.counts[path] = index + 1
        output = super().call_module(m, forward, args, kwargs)
        if path:
            self.calls.append(ModuleCall(path, index, _nodes(args), _nodes(kwargs), _nodes(output)))
        return output


def _raw_attribute(module: nn.Module, target: str) -> Any:
    """The attribute itself: while fx traces, getattr on a module gives proxies."""
    *parents, name = target.split(".")
    for parent in parents:
        child = module._modules[parent]
        assert child is not None
        module = child
    for table in (module._parameters, module._buffers, module.__dict__):
        if name in table:
            return table[name]
    return None


def strip(name: str) -> str:
    """A name below the wrapper as the model's own name."""
    return name.removeprefix(_MODEL).removeprefix(".")


def _nodes(tree: Any) -> Any:
    return pytree.tree_map_only(fx.Proxy, lambda proxy: proxy.node, tree)


class _Wrapper(nn.Module):
    """A forward with one positional argument per tensor; everything else is a constant of the trace."""

    def __init__(self, model: nn.Module, leaves: list[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.add_module(_MODEL, model)
        self.leaves, self.spec = leaves, spec
        self.out_spec: pytree.TreeSpec | None = None

    def run(self, *tensors: Any) -> tuple[Any, ...]:
        values = iter(tensors)
        leaves = [next(values) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        flat, self.out_spec = pytree.tree_flatten(self.get_submodule(_MODEL)(*args, **kwargs))
        return tuple(flat)


def _wrapper(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> _Wrapper:
    """fx reads the argument names off the code object, so forward is written out with them."""
    leaves, spec = pytree.tree_flatten((args, kwargs))
    namespace: dict[str, Any] = {}
    listed = "".join(f", {name}" for name in names)
    exec(f"def forward(self{listed}): return self.run({', '.join(names)})", namespace)
    kind: type[_Wrapper] = type("_TracedCall", (_Wrapper,), {"forward": namespace["forward"]})
    return kind(model, leaves, spec)


def _trace(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: inspect.Signature, mode: Mode
) -> Captured:
    templates, tensors = input_templates(parameters, args, kwargs)
    labels = slot_labels(templates, len(tensors))
    names = [_identifier(label, i) for i, label in enumerate(labels)]
    wrapper = _wrapper(model, args, kwargs, names)
    tracer = _Tracer(tensors)
    graph = tracer.trace(wrapper)
    module = graft(model)
    for node in graph.nodes:
        if node.op == "get_attr":
            node.target = _attribute(module, wrapper, str(node.target))
    module.graph = graph
    remove_dead(module.graph)
    functional = functionalize(module)
    functional.merged = merge_equal_reads(module)
    spell_out_indexed_adds(module.graph)
    assert wrapper.out_spec is not None
    checks = tuple(TensorGuard(name, t.dtype, t.dim(), (), ()) for name, t in zip(labels, tensors, strict=True))
    guards = Guards(checks, dtypes=parameter_dtypes(model))
    signature = CallSignature(parameters, templates, len(tensors), wrapper.out_spec, guards, libraries.HINTS)
    module.graph.set_codegen(CallCodeGen(signature))
    module.recompile()
    calls = refreshed(tracer.calls, module.graph, functional)
    captured = Captured(module, signature, mode, "fx", calls, notes=list(functional.notes))
    captured.functional = functional
    captured.attempt = Attempt(args, kwargs, None, "symbolic sizes")
    captured.open_dims = [(name, axis) for name, t in zip(labels, tensors, strict=True) for axis in range(t.dim())]
    return captured


def _attribute(module: fx.GraphModule, wrapper: nn.Module, target: str) -> str:
    """A parameter or buffer keeps its name; a constant that fx attached to the wrapper moves over."""
    if target.startswith(_MODEL):
        return graph_target(module, strip(target))
    value = getattr(wrapper, target)
    return add_constant(module, target, value)


def _identifier(label: str, index: int) -> str:
    return label if label.isidentifier() else f"input_{index}"
