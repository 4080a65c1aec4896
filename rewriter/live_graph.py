"""A graph that Dynamo captured, made ready for the search and the passes, and turned back into what its compilers expect.

Dynamo hands the parameters in as inputs and leaves example values under a key of its own. In between they are attributes
and `val`, as everywhere else in resfx.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from resfx.equal_reads import merge_equal_reads
from resfx.export_route import has_effect
from resfx.failure import without_own_frames
from resfx.functionalize import functionalize
from resfx.indexed_adds import spell_out_indexed_adds
from resfx.joined_parts import read_parts_of_the_whole
from resfx.live_grad import inline_no_grad
from resfx.live_indexing import spell_out_indexing
from resfx.live_regions import inline_checkpoints
from resfx.live_selective import close_regions
from resfx.twins import written_arguments

_STAND_IN = "resfx_input_"
_STEP = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_FROM_LOCAL = re.compile(rf"L\['(\w+)'\](?:{_STEP.pattern})+")


class LiveGraph:
    """A working copy of a Dynamo graph. `module.graph` is what the search reads and the passes edit.

    `inputs` are what the compiled graph is called with, in the order of its placeholders; `root` is the attached model.
    """

    def __init__(self, dynamo: fx.GraphModule, inputs: Sequence[Any], root: nn.Module) -> None:
        self.dynamo, self.inputs, self.root = dynamo, list(inputs), root
        self.module = fx.GraphModule(dynamo, _copied(dynamo.graph))
        self.graph = self.module.graph
        self.placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        self.added: list[str] = []  # the names of the new parameters, in the order of their placeholders
        self._stand_ins: dict[fx.Node, fx.Node] = {}

    def prepare(self) -> None:
        """Inline regions, tell module paths, make in-place updates functional, let parameters be attributes."""
        inline_checkpoints(self.module)
        spell_out_indexing(self.graph)
        self._name_modules()
        self._make_functional()
        self._merge_reads()
        spell_out_indexed_adds(self.graph)
        read_parts_of_the_whole(self.graph)
        inline_no_grad(self.graph)
        self._lift(_is_weight(self.root))

    def finish(self) -> tuple[fx.GraphModule, list[Any]]:
        """The edited graph as Dynamo would have made it, with the new parameters as further inputs, and all inputs."""
        self._lower()
        added = self._add_inputs()
        self.added = list(added)
        close_regions(self.module)
        for node in self.graph.nodes:
            if "val" in node.meta:
                node.meta.setdefault("example_value", node.meta["val"])
        self.graph.lint()
        result = fx.GraphModule(self.module, self.graph)
        _carry_over(self.dynamo, result)
        return result, [*self.inputs, *added.values()]

    def parameters(self) -> dict[str, str]:
        """What the attached model calls its Parameters first, by what a prepared graph calls them."""
        first = {id(tensor): name for name, tensor in self.root.named_parameters()}
        values = dict(zip(self.placeholders, self.inputs, strict=True))
        lifted = {str(stand_in.target): id(values[node]) for stand_in, node in self._stand_ins.items()}
        return {target: first[tensor] for target, tensor in lifted.items() if tensor in first}

    # Where a node comes from.

    def _name_modules(self) -> None:
        """Module stacks name their modules as the root does, whatever frame the graph was captured from."""
        names = _module_names(self.root)
        base = self._base(names)
        for node in self.graph.nodes:
            stack = {"": (base, nn.Module)}
            for key, (_, kind) in (node.meta.get("nn_module_stack") or {}).items():
                name = names.get(str(key).split("@")[0])
                if name is not None:
                    stack[str(key)] = (name, kind)
            node.meta["nn_module_stack"] = stack

    def _base(self, names: Mapping[str, str]) -> str:
        """The module whose method the frame is: what `self` is there, told by a parameter that is reached through it."""
        paths = {id(tensor): name for name, tensor in _tensors(self.root)}
        for node, value in zip(self.placeholders, self.inputs, strict=True):
            local, steps = _steps_from_local(node)
            name = paths.get(id(value))
            if name is None or not steps or not f".{name}".endswith(f".{steps}"):
                continue
            module = self.root.get_submodule(name[: -len(steps)].rstrip("."))
            if local == _own_name(module):
                return names[str(id(module))]
        return ""

    # In-place updates.

    def _make_functional(self) -> None:
        """Updates of values that the graph made itself; its inputs (a cache, a buffer) stay mutated in place."""
        if not any(written_arguments(node) for node in self.graph.nodes):
            return
        unread = self._unread()
        self._lift(lambda value: isinstance(value, torch.Tensor))
        functionalize(self.module)
        self._lower()
        self._drop_unread_but(unread)

    def _unread(self) -> set[fx.Node]:
        return {node for node in self.graph.nodes if not node.users}

    def _drop_unread_but(self, earlier: Container[fx.Node]) -> None:
        """What Dynamo left unread may matter to it; what nobody reads any more would count as a reader of the stream."""
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node in earlier or has_effect(node))

    def _merge_reads(self) -> None:
        unread = self._unread()
        if merge_equal_reads(self.module):
            self._drop_unread_but(unread)

    # Inputs as attributes, and back.

    def _lift(self, wanted: Callable[[Any], bool]) -> None:
        last = self.placeholders[-1] if self.placeholders else None
        learned = {id(tensor) for tensor in self.root.parameters()}
        for number, (node, value) in enumerate(zip(self.placeholders, self.inputs, strict=True)):
            if not wanted(value):
                continue
            assert last is not None
            name = f"{_STAND_IN}{number}"
            _register(self.module, name, value, learned)
            with self.graph.inserting_after(last):
                stand_in = self.graph.get_attr(name)
            stand_in.meta = copy.copy(node.meta)
            node.replace_all_uses_with(stand_in)
            self._stand_ins[stand_in] = node

    def _lower(self) -> None:
        for stand_in, node in self._stand_ins.items():
            stand_in.replace_all_uses_with(node)
            self.graph.erase_node(stand_in)
            _unregister(self.module, str(stand_in.target))
        self._stand_ins.clear()

    def _add_inputs(self) -> dict[str, Any]:
        """Every `residual.*` attribute becomes one more placeholder, after all others; returns their example values."""
        made: dict[str, fx.Node] = {}
        last = self.placeholders[-1] if self.placeholders else None
        for node in list(self.graph.nodes):
            if node.op != "get_attr" or not str(node.target).startswith("residual."):
                continue
            name = str(node.target)
            if name not in made:
                last = made[name] = self._placeholder(name, node.meta["val"], last)
            node.replace_all_uses_with(made[name])
            self.graph.erase_node(node)
        return {name: node.meta["val"] for name, node in made.items()}

    def _placeholder(self, name: str, value: Any, last: fx.Node | None) -> fx.Node:
        place = self.graph.inserting_after(last) if last is not None else self.graph.inserting_before(None)
        with place:
            new = self.graph.placeholder(name.replace(".", "_"))
        new.meta = {"val": value, "example_value": value}
        # As Dynamo marks the model's own parameters: CUDA graphs need not copy them.
        new.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
        new._dynamo_source = None
        return new


def _copied(graph: fx.Graph) -> fx.Graph:
    """A copy whose nodes have their example values as `val`, and no line of resfx as their source.

    Dynamo keeps sources as attributes of placeholders.
    """
    result = fx.Graph()
    result._codegen = copy.deepcopy(graph._codegen)
    env: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        new = env[node] = result.node_copy(node, lambda n: env[n])
        new.meta = copy.copy(node.meta)
        if "example_value" in new.meta:
            new.meta["val"] = new.meta["example_value"]
        if new.meta.get("stack_trace"):
            new.meta["stack_trace"] = without_own_frames(new.meta["stack_trace"])
        if hasattr(node, "_dynamo_source"):
            new._dynamo_source = node._dynamo_source
    return result


def _carry_over(dynamo: fx.GraphModule, result: fx.GraphModule) -> None:
    """What Dynamo tells compilers about the graph, beside the graph."""
    result.meta.update(dynamo.meta)
    for name in ("compile_subgraph_reason", "_param_name_to_source", "_backend_id"):
        if hasattr(dynamo, name):
            object.__setattr__(result, name, getattr(dynamo, name))


def _is_weight(root: nn.Module) -> Callable[[Any], bool]:
    own = {id(tensor) for _, tensor in _tensors(root)}
    return lambda value: isinstance(value, nn.Parameter) or id(value) in own


def _tensors(root: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from root.named_parameters(remove_duplicate=False)
    yield from root.named_buffers(remove_duplicate=False)


def _module_names(root: nn.Module) -> dict[str, str]:
    """Module path by the key that Dynamo gives a module in `nn_module_stack`: its id."""
    names: dict[str, str] = {}
    for path, module in root.named_modules():
        names[str(id(module))] = path
        gate = vars(module).get("forward")
        frame = getattr(gate, "frame", None)
        if isinstance(frame, nn.Module):
            names[str(id(frame))] = path
    return names


def _steps_from_local(node: fx.Node) -> tuple[str, str]:
    """(`self`, `h.0.weight`) for a placeholder that is `self.h[0].weight` of its frame; Dynamo keeps that as text only."""
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", None)
    text = name() if callable(name) else name
    found = _FROM_LOCAL.fullmatch(text) if isinstance(text, str) else None
    return (found[1], ".".join(_STEP.findall(found[0]))) if found else ("", "")


def _own_name(module: nn.Module) -> str:
    """What the methods of `module` call it: the first argument of its forward, `self` where that tells nothing."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code.co_varnames[0] if code is not None and code.co_argcount else "self"


def _register(module: nn.Module, name: str, value: Any, learned: Container[int]) -> None:
    """`learned`: the ids of what stands in for Parameters; a functional call may have put plain tensors there."""
    if isinstance(value, nn.Parameter):
        module._parameters[name] = value
    elif id(value) in learned:
        module._parameters[name] = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
    else:
        module._buffers[name] = value


def _unregister(module: nn.Module, name: str) -> None:
    module._parameters.pop(name, None)
    module._buffers.pop(name, None)
