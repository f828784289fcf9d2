"""Times transfers over launch shapes, and what a GEMM and a decode step lose beside each.

`python -m bench.launches` on a CUDA GPU with SGLang: the fused transfer at pages of one token;
with `--dma`: the dma transfer at pages of 64, its ring, and the length from which on it is faster
than fused. 2,048 tokens of Qwen3-8B, and 128 as ms_short. hiqcache/transfers/launch.py has what was
chosen.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from bench.lab import environment
from bench.launches import dma, fused
from bench.launches.measuring import TOKENS
from bench.transfers.contenders import POOL_GB, DevicePool
from bench.transfers.timing import pcie_ceiling


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.launches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dma", action="store_true", help="the dma transfer, not the fused one")
    parser.add_argument(
        "--out", type=Path, help="default: results/h200/launches.json, with --dma launches_dma.json"
    )
    parser.add_argument("--report-only", action="store_true", help="remake the table")
    options = parser.parse_args()
    swept = dma if options.dma else fused
    name = "launches_dma" if options.dma else "launches"
    out: Path = options.out or Path("results/h200") / f"{name}.json"
    report = out.with_suffix(".md")
    if options.report_only:
        report.write_text(swept.table(json.loads(out.read_text())))
        return
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU; a table alone: --report-only")
    from bench.transfers.stock import host_memory

    # A server's transfers have a stream of their own, and not the default one.
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    host, pool = host_memory(POOL_GB * 10**9), DevicePool()
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.launches", *sys.argv[1:]]),
        "versions": environment.versions(),
        "environment": environment.describe(),
        "card": torch.cuda.get_device_name(),
        "pcie_gbps": pcie_ceiling(host),
        "tokens": TOKENS,
        "rows": rows,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    for row in swept.sweep(host, pool):
        rows.append(row)
        print(json.dumps(row), flush=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
    report.write_text(swept.table(result))


if __name__ == "__main__":
    main()
