"""Times transfers at pages of 64 and 16 tokens, by kernels and by the copy engine, and beside work.

`python -m bench.transfers.pages` needs a CUDA GPU and SGLang. Qwen3-8B's KV shape, page_first,
random whole pages, host pools of 4 GB. Contenders: SGLang's own pool as a server runs it (its TMA
mover where the card has it), and each codec by fused and by dma, with host slots on the CPU, as the
plug-in has SGLang hand them over. For each: the stream's time, the host's time for the calls, and
the stream's time where the host was ahead (`ms_ahead`), so that none of it is Python. Then what a
GEMM and a decode step lose beside transfers of 2,048 tokens at pages of 64, and where the launches
of hiqcache/transfers/launch.py come from: dma's kernels in several widths.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.lab import environment
from bench.transfers.contenders import (
    DEVICE_SLOTS,
    HEAD_DIM,
    HEADS,
    LAYERS,
    Contender,
    DevicePool,
)
from bench.transfers.indices import Indices
from bench.transfers.interference import interference
from bench.transfers.timing import pcie_ceiling, spread, timed
from hiqcache.codecs import get_codec
from hiqcache.record import RecordLayout, kv_parts
from hiqcache.transfers.base import Arena
from hiqcache.transfers.dma import DmaTransfer
from hiqcache.transfers.fused import FusedTransfer
from hiqcache.transfers.launch import DECODE, Launch

PAGES = (64, 16)
TOKENS = (2048, 512, 128)
HOST_BYTES = 4 * 10**9
STOCK_SLOTS = 20_032
REPEATS = 15
SETS = 3
#: Cycles that hold the stream back until the host has enqueued a transfer: some 3 ms.
AHEAD_CYCLES = 6_000_000
#: Widths of dma's kernels that are tried, beside the one that serves.
WIDTHS = (Launch(8192, 16, 8), Launch(8192, 64, 8), Launch(8192, 132, 8), Launch(8192, 2048, 4))


class _OnCpu(Contender):
    """A contender that gets host slots on the CPU both ways."""

    def run(self, direction: str, indices: Indices) -> None:
        super().run(direction, indices._replace(host=indices.host_on_cpu))


def whole_pages(tokens: int, page: int, host_slots: int, seed: int) -> Indices:
    """Random whole pages: host slots and device rows."""
    random = torch.Generator().manual_seed(1000 * tokens + seed)

    def slots(of: int) -> torch.Tensor:
        pages = torch.randperm(of // page, generator=random)[: tokens // page]
        return (pages[:, None] * page + torch.arange(page)).flatten()

    host, rows = slots(host_slots), slots(DEVICE_SLOTS)
    return Indices(host.cuda(), rows.cuda(), host)


def ours(codec: str, pool: DevicePool, host: torch.Tensor, page: int) -> Iterator[Contender]:
    """The contenders of one codec in ``host``: fused, dma, and dma in other widths at 64."""
    layout = RecordLayout(LAYERS, page, get_codec(codec).row_formats(kv_parts(HEADS, HEAD_DIM)))
    pages = layout.pages_in(len(host))
    arena = Arena(host[: layout.arena_bytes(pages)], layout, pages)
    rows = get_codec(codec), arena, (pool.k, pool.v)
    size = layout.bytes_per_token, pages * page, page
    yield _OnCpu(codec, "fused", FusedTransfer(*rows), *size)
    yield _OnCpu(codec, "dma", DmaTransfer(*rows), *size)
    for width in WIDTHS if page == PAGES[0] else ():
        name = f"dma, {width.programs} programs of {width.warps} warps"
        yield _OnCpu(codec, name, DmaTransfer(*rows, encode=width, decode=width), *size)


def measure(contender: Contender, page: int, tokens: int) -> Iterator[dict[str, Any]]:
    """A row for each direction."""
    sets = [whole_pages(tokens, page, contender.slots, seed) for seed in range(SETS)]
    for direction in ("backup", "restore"):

        def call(turn: int, direction: str = direction) -> Callable[[], None]:
            return lambda: contender.run(direction, sets[turn % SETS])

        times, host, ahead = [], [], []
        for turn in range(-3, REPEATS):
            taken = timed(call(turn))
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(turn)()
            spent = (time.perf_counter() - start) * 1e3
            held = timed_ahead(call(turn))
            if turn >= 0:
                times.append(taken)
                host.append(spent)
                ahead.append(held)
        yield {
            "codec": contender.codec,
            "transfer": contender.transfer,
            "page": page,
            "tokens": tokens,
            "direction": direction,
            **spread(times),
            "ms_ahead": round(statistics.median(ahead), 4),
            "ms_host": round(statistics.median(host), 4),
            "bytes_per_token": contender.bytes_per_token,
            "held_bytes": contender.mover.staging_bytes,
        }


def timed_ahead(work: Callable[[], object]) -> float:
    """Milliseconds of the current stream for ``work``, which the host enqueued before it began."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def run(out: Path) -> None:
    """Measure everything, and write ``out`` after every contender."""
    from bench.transfers.stock import StockTransfer, host_memory

    pool, hosts = DevicePool(), [host_memory(HOST_BYTES) for _ in range(2)]
    ceiling = pcie_ceiling(hosts[0])
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.transfers.pages", *sys.argv[1:]]),
        "versions": environment.versions(),
        "environment": environment.describe(),
        "card": torch.cuda.get_device_name(),
        "pcie_gbps": ceiling,
        "serves": {codec: launch._asdict() for codec, launch in DECODE.items()},
        "rows": [],
        "beside": [],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    # A server's transfers have a stream of their own.
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    for page in PAGES:
        stock = StockTransfer(pool.k, pool.v, page, "page_first", STOCK_SLOTS // page * page)
        given = [
            Contender(
                "bf16", "stock", stock, stock.bytes_per_token, STOCK_SLOTS // page * page,
                page, ("backup",) if stock.backup_wants_cpu_slots else (),
            ),
            *ours("int8", pool, hosts[0], page),
            *ours("int8-rot", pool, hosts[1], page),
        ]  # fmt: skip
        for contender in given:
            for tokens in TOKENS:
                for row in measure(contender, page, tokens):
                    way = "d2h" if row["direction"] == "backup" else "h2d"
                    moved = tokens * row["bytes_per_token"] / 1e6
                    row["pcie_share"] = round(moved / row["ms_median"] / ceiling[way], 4)
                    row["pcie_share_ahead"] = round(moved / row["ms_ahead"] / ceiling[way], 4)
                    result["rows"].append(row)
                    print(json.dumps(row), flush=True)
            out.write_text(json.dumps(result, indent=1) + "\n")
        if page == PAGES[0]:
            sets = [whole_pages(2048, page, contender.slots, 0) for contender in given]
            for row in interference(given, sets):
                result["beside"].append(row)
                print(json.dumps(row), flush=True)
            out.write_text(json.dumps(result, indent=1) + "\n")
        stock.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results/h200/pages.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA GPU")
    run(options.out)


if __name__ == "__main__":
    main()
