"""Registers and spills of the Triton kernels, compiled ahead by the ptxas in the triton wheel.

    python benchmarks/spills.py [ARCHITECTURE ..] [--json]

No GPU is needed. Spills are bytes that a thread writes to memory for want of registers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import triton
from rich.console import Console
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from resfx.passes import group_triton
from resfx.passes.group_kernels import kernel_options
from resfx.passes.schedule import most_readers

ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}
WIDTHS = (1024, 4096)
KERNELS = ("carry_kernel", "read_kernel", "back_older_kernel", "back_kernel")
_WIDE = {"keys", "lse", "to_totals", "to_keys"}  # the others are like the stream
_NUMBERS = {"count": "i32", "tokens": "i32", "eps": "fp32", "first": "i32"}


@dataclass(frozen=True)
class Compiled:
    """What ptxas says of one kernel."""

    kernel: str
    architecture: str
    width: int
    registers: int
    spilled: int


def compiled(name: str, architecture: str, width: int, dtype: str = "bf16") -> Compiled:
    """The kernel with all that it can do, for streams of `width` features in `dtype`."""
    kernel = getattr(group_triton, name)
    options = kernel_options(most_readers(width), width)
    warps = options.pop("num_warps")
    constants = {n: options.get(n, True) for n in kernel.arg_names if n.isupper()}
    tensors = [n for n in kernel.arg_names if not n.isupper() and n not in _NUMBERS]
    signature: dict[str, str] = {n: "*fp32" if n in _WIDE else f"*{dtype}" for n in tensors}
    signature |= _NUMBERS | dict.fromkeys(constants, "constexpr")
    aligned: Any = {(kernel.arg_names.index(n),): [["tt.divisibility", 16]] for n in [*tensors, "tokens"]}
    source = ASTSource(kernel, {n: signature[n] for n in kernel.arg_names}, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", ARCHITECTURES[architecture], 32)
    return Compiled(
        name, architecture, width, *_assembled(triton.compile(source, target, {"num_warps": warps}).asm["ptx"])
    )


def _assembled(ptx: str) -> tuple[int, int]:
    """Registers of a thread, and bytes it spills."""
    assembler = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "ptxas"
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        name = assembler if "sm_10" not in target[1] else assembler.with_name("ptxas-blackwell")
        command = [
            str(name if name.exists() else assembler),
            "-v",
            f"--gpu-name={target[1]}",
            str(file),
            "-o",
            f"{file}.cubin",
        ]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert spilled is not None
    assert registers is not None
    return int(registers[1]), int(spilled[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=", ".join(ARCHITECTURES))
    parser.add_argument("--json", action="store_true", help="one line of JSON for each kernel")
    options = parser.parse_args()
    shown = Table("kernel", "architecture", "D", "registers", "spilled bytes")
    for kernel, architecture, width in product(KERNELS, options.architectures or ARCHITECTURES, WIDTHS):
        row = compiled(kernel, architecture, width)
        if options.json:
            print(json.dumps(asdict(row)))
        shown.add_row(*map(str, astuple(row)))
    if not options.json:
        Console().print(shown)


if __name__ == "__main__":
    main()
