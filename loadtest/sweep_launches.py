"""Times the fused transfer over launch shapes, and what a GEMM and a decode step lose beside each.

`python -m loadtest.sweep_launches` on a CUDA GPU with SGLang; where BACKUP and RESTORE in
hiqcache/transfers/fused.py come from. 2,048 tokens of Qwen3-8B, page_first. Launch shapes that
take more than SLOW_MS are not pursued.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hiqcache.codecs import CODEC_NAMES, get_codec
from hiqcache.record import RecordLayout
from hiqcache.transfers.base import Arena
from hiqcache.transfers.fused import FusedTransfer, Launch
from loadtest.bench_transfers import (
    HEAD_DIM,
    HEADS,
    LAYERS,
    POOL_GB,
    Contender,
    DevicePool,
    index_sets,
    pcie_ceiling,
    timed,
    versions,
)
from loadtest.transfer_interference import compute_ms, decode_step, gemms

TOKENS = 2048
REPEATS = 9
#: A launch this slow (85 % of the ceiling is about 3.3 ms) is of no interest.
SLOW_MS = 3.8
#: Elements a tile and warps; 16 to 32 elements a thread.
TILES = ((4096, 4), (8192, 8), (8192, 16), (16384, 16), (16384, 32), (32768, 32))
PROGRAMS = (4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


def sweep(codec_name: str, host: torch.Tensor, pool: DevicePool) -> list[dict[str, Any]]:
    """A row for every launch shape that is fast enough, both directions."""
    codec = get_codec(codec_name)
    layout = RecordLayout(LAYERS, 1, *codec.row_formats(HEADS, HEAD_DIM))
    slots = layout.pages_in(len(host))
    arena = Arena(host[: layout.arena_bytes(slots)], layout, slots)
    sets = {order: index_sets(TOKENS, order, slots) for order in ("sequential", "random")}
    computes = {"gemm": gemms(), "decode_step": decode_step()}
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def beside(name: str, load: Callable[[], None] | None) -> float:
        loads = [load] * 8 if load else []
        return statistics.median(
            compute_ms(computes[name], lambda: [one() for one in loads], side)[0] for _ in range(5)
        )

    alone = {name: beside(name, None) for name in computes}
    rows: list[dict[str, Any]] = []
    for (elements, warps), programs in itertools.product(TILES, PROGRAMS):
        launch = Launch(elements, programs, warps)
        mover = FusedTransfer(codec, arena, pool.k, pool.v, launch, launch)
        contender = Contender(codec_name, "fused", mover, layout.bytes_per_token, slots)
        for direction in ("backup", "restore"):
            times = {
                order: statistics.median(
                    timed(partial(contender.run, direction, given[repeat % len(given)]))
                    for repeat in range(REPEATS)
                )
                for order, given in sets.items()
            }
            if times["sequential"] > SLOW_MS:
                continue
            load = partial(contender.run, direction, sets["sequential"][0])
            row = {"codec": codec_name, "direction": direction, **launch._asdict()}
            row |= {f"ms_{order}": round(ms, 3) for order, ms in times.items()}
            row |= {
                f"{name}_slowdown": round(beside(name, load) / alone[name], 3) for name in alone
            }
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    """Command line."""
    from hiqcache.sglang.stock import host_memory

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results/h200/launches.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    host, pool = host_memory(POOL_GB * 10**9), DevicePool()
    result: dict[str, Any] = {
        "command": f"python -m loadtest.sweep_launches {' '.join(sys.argv[1:])}".strip(),
        "versions": versions(),
        "card": torch.cuda.get_device_name(),
        "pcie_gbps": pcie_ceiling(host),
        "rows": [],
    }
    for codec_name in CODEC_NAMES:
        result["rows"] += sweep(codec_name, host, pool)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
