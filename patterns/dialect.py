"""Which node is an add, a cast, a norm, a view: one vocabulary for every spelling.

A graph may speak ATen overloads (torch.export), torch functions and operators (torch.fx), tensor methods, or all of them.
`op_name` folds them into one name; the sets below group the names by what they do to a residual stream. Names of
operations only: never of modules or classes.
"""

from __future__ import annotations

import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

_RENAMED = {
    "iadd": "add", "radd": "add", "isub": "sub", "subtract": "sub", "imul": "mul", "rmul": "mul", "multiply": "mul",
    "truediv": "div", "itruediv": "div", "true_divide": "div", "divide": "div", "rsub": "rsub", "concat": "cat",
    "concatenate": "cat", "negative": "neg", "t": "transpose", "swapaxes": "transpose", "swapdims": "transpose",
    "mT": "transpose", "mH": "transpose", "matrix_H": "transpose", "adjoint": "transpose", "numpy_T": "T",
    "H": "transpose", "data": "detach", "moveaxis": "movedim", "matmul": "matmul", "imatmul": "matmul", "pow": "pow", "ipow": "pow",
    "nn_dropout": "dropout", "scaled_dot_product_attention": "attention",
}  # fmt: skip

# Copies and casts of the same numbers. Dropout is here because on the skip it is the identity in expectation and in eval.
CAST = frozenset(
    "to _to_copy type type_as float half bfloat16 double contiguous clone detach alias lift_fresh lift_fresh_copy "
    "positive convert_element_type dropout native_dropout feature_dropout alpha_dropout feature_alpha_dropout "
    "_autocast_to_full_precision _autocast_to_reduced_precision requires_grad".split()
)
LAYOUT = frozenset(
    "view reshape _unsafe_view view_as reshape_as permute transpose T movedim flatten unflatten squeeze unsqueeze "
    "_reshape_copy _reshape_alias view_copy _add_batch_dim _remove_batch_dim".split()
)
EXPAND = frozenset("expand expand_as broadcast_to".split())
IDENTITY = CAST | LAYOUT | EXPAND
SLICE = frozenset("slice select narrow".split())
SPLIT = frozenset("split split_with_sizes chunk unbind tensor_split unsafe_split unsafe_chunk".split())

# Read sizes, dtype or device, never the numbers.
SHAPE_ONLY = frozenset(
    "sym_size size dim ndimension numel sym_numel sym_stride stride sym_storage_offset storage_offset getattr "
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_full new_empty "
    "new_empty_strided _assert_tensor_metadata is_floating_point shape dtype device".split()
)

# Take a dtype or a shape from their second operand: its numbers are not read.
ALIKE = frozenset("to type_as view_as reshape_as expand_as".split())

# A weight that meets the state here maps it: matrix products, convolutions, recurrent cells.
CONTRACTION = frozenset(
    "linear matmul mm bmm mv dot addmm baddbmm addbmm addmv addr einsum inner outer tensordot bilinear chain_matmul "
    "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d "
    "conv_transpose2d conv_transpose3d lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "attention multi_head_attention_forward _native_multi_head_attention _transformer_encoder_layer_fwd "
    "_scaled_mm _grouped_mm grouped_mm scaled_mm scaled_grouped_mm deform_conv2d "
    "_int_mm _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _dyn_quant_matmul_4bit".split()
)

# To the frequency domain: a product with a weight there is a convolution with it.
TO_SPECTRUM = frozenset("fft_fft fft_rfft fft_fft2 fft_rfft2 fft_fftn fft_rfftn fft_ihfft _fft_r2c _fft_c2c".split())

# A norm or an activation: on the stream itself these make a transition N_l.
NORM = frozenset(
    "layer_norm native_layer_norm batch_norm native_batch_norm _native_batch_norm_legit _batch_norm_with_update "
    "_batch_norm_no_update cudnn_batch_norm group_norm native_group_norm rms_norm _fused_rms_norm instance_norm "
    "local_response_norm normalize".split()
)
ACTIVATION = frozenset(
    "relu relu6 leaky_relu gelu silu sigmoid tanh elu celu selu softplus softsign hardtanh hardswish hardsigmoid mish "
    "logsigmoid log_sigmoid threshold prelu rrelu hardshrink softshrink tanhshrink clamp clamp_min clamp_max square "
    "erf sin cos exp".split()
)
# What a norm written by hand is made of.
NORM_PARTS = frozenset(
    "add sub rsub mul div neg pow square sqrt rsqrt reciprocal abs exp mean sum var std var_mean std_mean norm "
    "linalg_vector_norm vector_norm amax amin max min maximum minimum where clamp clamp_min getitem".split()
)
POINTWISE = NORM | ACTIVATION | NORM_PARTS | CAST | EXPAND | LAYOUT

_SAME_NUMBERS = frozenset({"T", "mT", "H", "mH", "real", "imag", "data"})  # attributes that are no size


@functools.cache
def _function_name(target: Callable[..., Any]) -> str:
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return str(schema.name).rsplit("::", 1)[-1]
    return str(getattr(target, "__name__", target))


@functools.cache
def _canonical(name: str) -> str:
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
    elif name.endswith("_") and len(name) > 1:
        name = name[:-1]
    return _RENAMED.get(name, name)


def op_name(node: Node) -> str:
    """The canonical name of what `node` computes: "add" for `aten.add_.Tensor`, `operator.iadd` and `x.add_(y)`."""
    if node.op == "call_function" and node.target is getattr and node.args[1] in _SAME_NUMBERS:
        return _canonical(str(node.args[1]))  # `x.mT`, where a graph has it as an attribute
    if node.op == "call_function":
        return _canonical(_function_name(node.target))
    if node.op == "call_method":
        return _canonical(str(node.target))
    return node.op


def is_custom(node: Node) -> bool:
    """True for an operator outside ATen: a registered custom op or a higher-order operator."""
    target = node.target
    if node.op != "call_function":
        return False
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.name.startswith("aten::")
    if isinstance(target, torch._ops.OpOverloadPacket):
        return not str(target).startswith("aten.")
    return isinstance(target, torch._ops.HigherOrderOperator)


def data_inputs(node: Node) -> Iterator[Node]:
    """The inputs whose numbers `node` reads: none for shape-only operations, no index or size arguments of `getattr`."""
    name = op_name(node)
    if name in SHAPE_ONLY:
        return iter(())
    return iter(node.all_input_nodes[:1] if name in ALIKE else node.all_input_nodes)


def value(node: Node) -> Any:
    """The example value (a FakeTensor, a tuple of them, a SymInt) that capture left in the node, or None."""
    meta = node.meta
    return meta.get("val", meta.get("example_value"))


def shape_of(node: Node) -> tuple[Any, ...] | None:
    val = value(node)
    return tuple(val.shape) if isinstance(val, torch.Tensor) else None


def is_floating(node: Node) -> bool:
    val = value(node)
    if not isinstance(val, torch.Tensor):
        return True  # unknown: a tuple, or a graph without example values
    return val.is_floating_point() or val.is_complex()


# Integers that stand for numbers: what a quantised activation and its products are in. Indices are int64.
_QUANTISED = frozenset({torch.int8, torch.uint8, torch.int16, torch.int32})


def holds_numbers(node: Node) -> bool:
    """Whether a state can live in the node's value: floating, or quantised; not an index, a mask or a size."""
    val = value(node)
    return is_floating(node) or (isinstance(val, torch.Tensor) and val.dtype in _QUANTISED)


def same_shape(left: Node, right: Node) -> bool:
    """True where both example shapes are known and equal, symbol by symbol."""
    a, b = shape_of(left), shape_of(right)
    return a is not None and b is not None and equal_shapes(a, b)


def as_large(operand: Node, result: Node) -> bool:
    """Has the operand of an elementwise operation its result's shape? One that is broadcast has a 1 in its place.

    So equal sizes in the example tell, where the sizes are other expressions.
    """
    a, b = shape_of(operand), shape_of(result)
    if a is None or b is None or len(a) != len(b):
        return False
    return all(_same_size(x, y) or _example_size(x) == _example_size(y) != 1 for x, y in zip(a, b, strict=True))


def equal_shapes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """True where the sizes are equal, symbol by symbol."""
    return len(a) == len(b) and all(_same_size(x, y) for x, y in zip(a, b, strict=True))


def as_many(left: Node, right: Node) -> bool:
    """Whether both hold as many numbers, judged by the example where sizes are symbolic; true where a shape isn't known."""
    a, b = shape_of(left), shape_of(right)
    return a is None or b is None or math.prod(map(_example_size, a)) == math.prod(map(_example_size, b))


def _example_size(size: Any) -> int:
    """The size in the example call; sizes that depend on data have none and count as 1."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.hint is not None else 1


def _same_size(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)  # symbols: compared as expressions, so that no guard is added


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = torch.__path__[0] + os.sep


def source_of(node: Node) -> str:
    """`file:line` of the innermost frame outside the torch package; inside, where a model of torch's own has no other.

    "" where the graph carries no trace.
    """
    trace = node.meta.get("stack_trace") or node.stack_trace or ""
    frames = [
        frame for frame in _FRAME.findall(trace) if not frame[0].startswith("<")
    ]  # "<eval_with_key>" is generated
    outside = [frame for frame in frames if not frame[0].startswith(_TORCH)]
    return ":".join((outside or frames)[-1]) if frames else ""


# torch.export's own entry on nodes that no module made.
_NO_MODULE = "_empty_nn_module_stack"


def call_entries(node: Node) -> list[tuple[str, int]]:
    """(module path, number of the call) of every module call that `node` was traced in, from the root, `""`, inwards."""
    stack = node.meta.get("nn_module_stack") or {}
    calls = []
    for key, (path, _) in stack.items():
        if str(key).startswith(_NO_MODULE):
            continue
        number = str(key).rsplit("@", 1)[-1] if "@" in str(key) else "0"
        calls.append((str(path).split("@")[0], int(number) if number.isdigit() else 0))
    return calls


def module_stack(node: Node) -> list[str]:
    """Module paths from the root's child down to the innermost module that made `node` (`""`, the root, left out)."""
    return [path for path, _ in call_entries(node) if path]


def module_path(node: Node) -> str:
    """The innermost module that made `node`, "" for the root."""
    stack = module_stack(node)
    return stack[-1] if stack else ""
