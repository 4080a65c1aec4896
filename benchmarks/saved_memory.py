"""What training keeps from the forward for the backward: `python benchmarks/saved_memory.py [NAME ..] [--sublayers N]`.

The reference net (`reference_net.py`), 12 sublayers, D 1024, 8 x 2048 tokens, bfloat16, for torch.compile on a GPU: what AOTAutograd's
forward graph hands to its backward, inputs and parameters left out. One line of JSON each: GB, how many tensors as large as the stream
("streams"; one that is 4 D wide counts as four), and the GB of what is smaller, such as scalars per token. Nothing runs.

Delta's and AttentionResidual's reads are counted one by one, as anywhere but on a GPU. There reads come in groups, and each of those keeps
one tensor more, what its group found for it: `lowering.py` counts that.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from gpu_static import pretended_gpu, saved
from lowering import nets, on_a_gpu
from reference_net import SUBLAYERS, WIDTH, example, with_memory
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode


def saved_in_training(build: Callable[[], nn.Module], x: Callable[[], Tensor] = example) -> list[Tensor]:
    """What one compiled step of training keeps, as fake tensors. Inductor's own hook for what compiles a graph, which is not public."""
    from torch._inductor.compile_fx import compile_fx

    found: list[Tensor] = []

    def count(graph_module: fx.GraphModule, inputs: Any, **options: Any) -> Callable[[Any], Any]:
        if not options.get("is_backward"):
            found.extend(saved(graph_module))

        def run(args: Any) -> Any:
            return graph_module(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Any:
        return compile_fx(graph_module, inputs, inner_compile=count)

    net = build()
    torch.compiler.reset()
    with FakeTensorMode(allow_non_fake_inputs=True), pretended_gpu():
        y = torch.compile(with_memory(net), backend=backend, fullgraph=True, dynamic=False)(x())
    assert y.requires_grad
    return found


def row(values: list[Tensor], stream: Tensor) -> dict[str, float]:
    """The figures of one line."""
    sizes = [value.numel() * value.element_size() for value in values]
    one = stream.numel() * stream.element_size()
    return {
        "GB": sum(sizes) / 1e9,
        "streams": sum(size // one for size in sizes),
        "smaller GB": sum(size for size in sizes if size < one) / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="lines; all of them if none is given")
    parser.add_argument("--sublayers", type=int, default=SUBLAYERS)
    parser.add_argument("--width", type=int, default=WIDTH)
    options = parser.parse_args()
    known = nets(options.sublayers, options.width)
    if unknown := sorted(set(options.names) - known.keys()):
        parser.error(f"no line named {', '.join(unknown)}; there are {', '.join(known)}")
    for name in options.names or known:
        with mock.patch("resfx.passes.products.widens_products", on_a_gpu):
            kept = saved_in_training(known[name], lambda: example(options.width))
        print(
            json.dumps({"name": name, **row(kept, torch.empty_like(example(options.width), device="meta"))}), flush=True
        )


if __name__ == "__main__":
    main()
