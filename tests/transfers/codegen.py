"""Compiles the fused kernels for an H100 or H200 (sm_90), without a GPU, and prints what came out.

Run by test_codegen.py in a process of its own, since there the kernels are Triton's to compile and
not the interpreter's. JSON lines: codec, heads, dim, order, rows, kernel, stages; of the machine
code, accesses of spilled registers in loops; bytes of shared memory, widths of global loads and
stores and what share of the bytes moves eight or more at once, sizes of asynchronous copies, and
how many of them may be pending when a round of the loop waits for others; how many neighbours in a
row a thread has where the kernel packs four.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hiqcache.codecs.base import FP8_DTYPES
from hiqcache.transfers import kernels, page_kernel_code
from hiqcache.transfers.launch import Launch
from tests.transfers.pools import Pool, Shape, fused

#: Dtypes of rows, as Triton calls them.
ROWS = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}

TARGET = GPUTarget("cuda", 90, 32)
NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"


def compiled(
    kernel: Any, launch: Launch, constants: tuple[Any, ...], rotates: bool, rows: str = "bf16"
) -> Any:
    """``kernel`` with the constants that FusedTransfer gives it, in the parameters' order.

    rows: their dtype, as Triton calls it.
    """
    names = kernel.arg_names
    given = names[len(names) - len(constants) :]
    pointers = {
        "arena": "*u8",
        "device": f"*{rows}",
        "bases": "*i64",
        "host_slots": "*i64",
        "device_slots": "*i64",
        "matrix": "*bf16" if rotates else "*i64",
        "signs": "*fp32",
    }
    counts = dict.fromkeys(
        ("tokens", "layer", "layers", "device_stride_0", "device_stride_1"), "i32"
    )
    signature = {
        name: "constexpr" if name in given else (pointers | counts).get(name, "i64")
        for name in names
    }
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name in ("arena", "device", "bases", "matrix", "signs")
        if name in names
    }
    values = {(names.index(name),): value for name, value in zip(given, constants, strict=True)}
    source = ASTSource(kernel, signature=signature, constexprs=values, attrs=aligned)
    return triton.compile(
        source, target=TARGET, options={"num_warps": launch.warps, "num_stages": 1}
    )


def spilled_in_loops(machine_code: str) -> int:
    """How many accesses of the stack lie between a label and a later branch back to it."""
    seen: dict[str, int] = {}
    within: set[int] = set()
    lines = machine_code.splitlines()
    for number, line in enumerate(lines):
        if label := re.match(r"(\.L_x_\d+):", line):
            seen[label[1]] = number
        elif branch := re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", line):
            within.update(range(seen.get(branch[1], number), number))
    # A kernel ends in a branch to itself, so that this alone is no loop.
    if len(within) < 20:
        raise ValueError("no loop was found in the machine code")
    return sum(bool(re.search(r"\b(LDL|STL)\b", lines[number])) for number in within)


def wide_share(accesses: list[str]) -> float:
    """The share of the bytes of ``accesses``, such as v4.b32, that move eight or more at once."""
    sizes = [
        int(count or 1) * int(bits) // 8
        for count, bits in re.findall(r"(?:v(\d)\.)?b(\d+)", " ".join(accesses))
    ]
    return sum(size for size in sizes if size >= 8) / max(sum(sizes), 1)


def describe(code: Any) -> dict[str, Any]:
    """What the machine code and the PTX show."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code.asm["cubin"])
        file.flush()
        command = [str(NVDISASM), "-c", file.name]
        machine_code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ptx, ttgir = code.asm["ptx"], code.asm["ttgir"]
    innermost = r"scf\.for (?:(?!scf\.for).)*?scf\.yield|$"
    (loop,) = re.findall(innermost, ttgir, re.DOTALL)[:1]
    layouts = dict(
        re.findall(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[1, (\d+)\]", ttgir, re.M)
    )
    packed = re.findall(r'inline_asm ".*packed_element = 4 .* -> tensor<\w+, (#\w+)>', ttgir)
    return {
        "spilled": spilled_in_loops(machine_code),
        "shared": code.metadata.shared,
        "copies": sorted(
            {int(size, 0) for size in re.findall(r"cp\.async\.c\w\.\S+ .*?, (\w+)", ptx)}
        ),
        "pending": [int(number) for number in re.findall(r"ttg\.async_wait.*num = (\d+)", loop)],
        "loads": sorted(set(re.findall(r"ld\.global\.(\S+)", ptx))),
        "stores": sorted(set(re.findall(r"st\.global\.(\S+)", ptx))),
        "wide_loads": wide_share(re.findall(r"ld\.global\.(\S+)", ptx)),
        "wide_stores": wide_share(re.findall(r"st\.global\.(\S+)", ptx)),
        "packed": [int(layouts.get(layout, 0)) for layout in packed],
    }


def main() -> None:
    # What FusedTransfer asks of memory is not needed to compile; the kernels stay Triton's.
    kernels.INTERPRETED = True
    codecs, orders = ("int8", "int8-rot", "int4"), ("page_first", "layer_first")
    cases = list(itertools.product(codecs, (1, 8), (64, 128), orders, (torch.bfloat16,)))
    cases += itertools.product(("int4",), (8,), (128,), orders[:1], FP8_DTYPES)
    for codec, heads, dim, order, dtype in cases:
        code_of = page_kernel_code if codec == "int4" else kernels
        page_size = 64 if codec == "int4" else 1
        shape = Shape(
            codec=codec,
            heads=heads,
            dim=dim,
            dtype=dtype,
            page_size=page_size,
            order=order,
            host_slots=64,
            device_slots=64,
        )
        transfer = fused(Pool(shape, torch.device("cpu")))
        for kernel, launch, constants in (
            (code_of.backup, transfer.launches["backup"], transfer._encode._constants),
            (code_of.restore, transfer.launches["restore"], transfer._decode._constants),
        ):
            code = compiled(kernel, launch, constants, codec != "int8", ROWS[dtype])
            row = {"codec": codec, "heads": heads, "dim": dim, "order": order}
            row |= {"rows": ROWS[dtype]}
            row |= {"kernel": kernel.__name__}
            print(json.dumps(row | {"stages": launch.stages} | describe(code)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
