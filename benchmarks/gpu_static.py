"""Static cost of Inductor's GPU code, on a machine without a GPU.

Compiles a module for a pretended H200 (sm_90) under fake tensors and reads Inductor's own accounting of what it generated: device
bytes moved, kernels, launches, and how many tensors a kernel takes. Nothing runs, so these figures have no noise; `seconds` is the
processor time of the whole compilation on this machine, Triton's and ptxas's part left out. A kernel's bytes are each buffer it
touches once; what it reads again is taken to hit a cache. Hand-written Triton kernels are counted by their whole tensor arguments:
pass them what they read, no more.

    measure(make, train=True) -> {"fwd": {...}, "bwd": {...}, "total_gb": ..., "launches": ..., "arguments": ..., "seconds": ...}

`make()` is called under FakeTensorMode, on the CPU, and returns (module, args, kwargs). The backward is that of sum(outputs).
"""

from __future__ import annotations

import contextlib
import re
import time
import types
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

DRAM_GBPS = 4800.0  # H200 datasheet
H200 = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    warp_size=32,
    total_memory=141 * 2**30,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=60 * 2**20,
    gcnArchName="",
    clock_rate=1980000,
)


class _Driver:
    """What Triton asks of a driver when nothing is launched."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_current_device(self):
        return 0

    def get_current_stream(self, *_):
        return 0

    def get_device_interface(self):
        return torch.cuda


@contextlib.contextmanager
def pretended_gpu():
    """Inside, Inductor and Triton believe in one H200. What they cache of it stays: measure in a process of its own."""
    import triton

    fields = {
        "type": "cuda",
        "index": 0,
        "multi_processor_count": 132,
        "cc": 90,
        "major": 9,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
        "warp_size": 32,
    }
    props = DeviceProperties(**{k: v for k, v in fields.items() if k in DeviceProperties._fields})
    from torch._inductor.fx_passes import joint_graph, post_grad, pre_grad

    with contextlib.ExitStack() as stack:

        def patch(*args):
            stack.enter_context(mock.patch(*args))

        def patch_object(*args):
            stack.enter_context(mock.patch.object(*args))

        for passes in (joint_graph, post_grad, pre_grad):  # patterns traced while no GPU is claimed
            passes.lazy_init()
            patch_object(passes, "lazy_init", lambda *a, **k: None)
        patch_object(DeviceProperties, "create", staticmethod(lambda device: props))
        patch("torch.cuda.is_available", lambda: True)
        patch("torch.cuda.current_device", lambda: 0)
        patch("torch.cuda.device_count", lambda: 1)
        patch("torch.cuda.get_device_properties", lambda *a: H200)
        patch("torch.cuda.get_device_capability", lambda *a: (9, 0))
        patch("torch.cuda.get_device_name", lambda *a: H200.name)
        patch("torch.cuda._lazy_init", lambda: None)
        patch("torch.cuda.is_initialized", lambda: False)
        patch("torch.cuda.get_rng_state", lambda *a, **k: torch.empty(16, dtype=torch.uint8, device="cpu"))
        patch("torch.cuda.set_rng_state", lambda *a, **k: None)
        patch("torch.cuda.is_current_stream_capturing", lambda: False)
        patch("torch.cuda.current_stream", lambda *a: None)
        patch("torch.cuda.synchronize", lambda *a: None)
        patch("torch._inductor.utils.get_gpu_dram_gbps", lambda: DRAM_GBPS)
        patch_object(CudaInterface.Worker, "get_device_properties", staticmethod(lambda *a: H200))
        patch_object(CudaInterface.Worker, "current_device", staticmethod(lambda: 0))
        patch_object(triton.runtime.driver, "_active", _Driver())
        yield


def _to_cuda(gm, example_inputs):
    """The same graph on a fake CUDA device. Autograd's engine refuses a device without a driver, so
    the joint graph is traced on the CPU and retargeted here, before lowering."""
    import copy

    from torch._inductor.compile_fx import record_original_output_strides
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    cuda = torch.device("cuda", 0)
    output_meta = gm.graph.output_node().meta
    gm = copy.deepcopy(gm)
    gm.graph.output_node().meta.update(output_meta)
    for node in gm.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.kwargs = {**node.kwargs, "device": cuda}
        node.args = tuple(cuda if isinstance(a, torch.device) else a for a in node.args)
    gm.recompile()
    mode = FakeTensorMode(
        shape_env=torch._guards.detect_fake_mode(example_inputs).shape_env, allow_non_fake_inputs=True
    )
    with mode:
        moved = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=cuda, requires_grad=False)
            if isinstance(x, torch.Tensor)
            else x
            for x in example_inputs
        ]
    for name, const in list(gm.named_buffers()):
        with mode:
            setattr(gm, name, torch.empty_strided(const.shape, const.stride(), dtype=const.dtype, device=cuda))
    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*moved)
    record_original_output_strides(gm)
    return gm, moved, mode


def _written_once(lowering):
    """Inductor counts a buffer that a hand-written Triton kernel fills as read and written. Count it once:
    such kernels write fresh buffers. (One that accumulates in place is then undercounted by its reads.)"""
    from torch._inductor import ir

    extra = 0
    for node in lowering.scheduler.nodes:
        if isinstance(node.node, ir.UserDefinedTritonKernel):
            accesses = node.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
            extra += sum(accesses.get(m.get_name(), 0) for m in node.node.mutation_outputs)
    return extra


def saved(gm):
    """The example values of what the forward graph hands to the backward: its outputs that are neither the user's nor inputs."""
    output = gm.graph.output_node()
    visible = set(output.meta.get("user_visible_output_idxs", range(len(output.args[0]))))
    nodes = {
        n: None
        for i, n in enumerate(output.args[0])
        if i not in visible and isinstance(n, torch.fx.Node) and n.op != "placeholder"
    }
    return [v for n in nodes if isinstance(v := n.meta.get("val"), torch.Tensor)]


def most_arguments(source):
    """The tensors that the widest of the generated kernels takes."""
    signatures = re.findall(r"'signature': {(.*?)}", source)
    return max((len(re.findall(r": '\*", signature)) for signature in signatures), default=0)


def _inner(records, sources):
    from torch._inductor.compile_fx import _recursive_post_grad_passes, view_to_reshape
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    def compile_inner(gm, example_inputs, **kw):
        is_backward = bool(kw.get("is_backward"))
        is_inference = bool(kw.get("is_inference"))
        traced = gm
        gm, example_inputs, fake_mode = _to_cuda(gm, example_inputs)
        view_to_reshape(gm)
        with V.set_fake_mode(fake_mode), V.set_debug_handler(DebugContext()):
            _recursive_post_grad_passes(gm, is_inference=is_inference)
            lowering = GraphLowering(
                gm,
                example_inputs=example_inputs,
                shape_env=fake_mode.shape_env,
                is_inference=is_inference,
                is_backward=is_backward,
            )
            # Off: what the caller's mode makes of a call mustn't meet the tensors of this one.
            with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), unset_fake_temporarily():
                lowering.run(*example_inputs)
                src = lowering.codegen()[0]
                src = getattr(src, "value", src)
                total, _, runtimes = lowering.count_bytes()
                total -= _written_once(lowering)
        extern = [
            n.node.python_kernel_name for n, _ in runtimes if hasattr(getattr(n, "node", None), "python_kernel_name")
        ]
        records["bwd" if is_backward else "fwd"] = {
            "gb": total / 1e9,
            "triton_kernels": src.count("async_compile.triton("),
            "launches": src.count(".run("),
            "extern": len(extern),
            "arguments": most_arguments(src),
        }
        if not is_backward:
            records["fwd"]["saved_gb"] = sum(v.numel() * v.element_size() for v in saved(gm)) / 1e9
        sources["bwd" if is_backward else "fwd"] = src

        def run(args):
            with torch._guards.detect_fake_mode(args):
                out = traced(*args)
            return out if isinstance(out, (tuple, list)) else (out,)

        run._boxed_call = True
        return run

    return compile_inner


def measure(make, train=True, dtype=torch.bfloat16, keep_source=False):
    """The figures of `make()`'s module; without `train`, of inference alone. `keep_source` adds the generated code."""
    from torch._inductor.compile_fx import compile_fx

    records: dict = {}
    sources: dict = {}
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), pretended_gpu():
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            module, args, kwargs = make()
        finally:
            torch.set_default_dtype(default)
        inner = _inner(records, sources)

        def backend(gm, example_inputs):
            return compile_fx(gm, example_inputs, inner_compile=inner)

        started = time.process_time()
        compiled = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
        with contextlib.nullcontext() if train else torch.no_grad():
            out = compiled(*args, **kwargs)
            if train:
                outs = [o for o in pytree.tree_leaves(out) if isinstance(o, torch.Tensor) and o.requires_grad]
                torch.autograd.backward(outs, [torch.empty_like(o) for o in outs])
        seconds = time.process_time() - started
    result = {
        **records,
        "total_gb": sum(r["gb"] for r in records.values()),
        "launches": sum(r["launches"] for r in records.values()),
        "arguments": max(r["arguments"] for r in records.values()),
        "seconds": seconds,
    }
    if keep_source:
        result["source"] = sources
    return result
