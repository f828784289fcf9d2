"""Times backups and restores on a GPU, SGLang's own next to ours.

`python -m bench.transfers` needs a CUDA GPU and SGLang. Measures, for Qwen3-8B's KV shape
(36 layers, 8 KV heads of 128, bf16), host pools of 4 GB and pages of 64, 16 and 1 tokens:

- the PCIe ceiling: copies of 1 GiB of pinned memory, each way;
- backup and restore of 128 to 8,192 tokens, of whole pages in sequence and at random, both host
  layouts, by SGLang's own pool (codec bf16, transfer stock), mover, fused and dma;
- what a GEMM and a decode step lose while a transfer runs beside them, at pages of 64 and of 1.

A time is that of the stream: from an event before the calls to one after, the stream empty before.
host_ms is that of the CPU for the calls; ms_ahead is the stream's where the CPU had enqueued all
before the stream began, so that none of it is Python. Ours get host slots on the CPU, as the
plug-in has SGLang hand them to dma, so bringing them to the device is part of their time; stock
gets them as SGLang brings them, on the device but for staged backups. The contenders take turns
within a repetition; mover has its turns alone, since it keeps the CPU so busy, in Python, that who
comes after it finds cold caches. Writes JSON after every setting; the table and the plot beside it
are made from that file, also alone: `--report-only`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.lab import environment
from bench.transfers import report
from bench.transfers.compiling import compile_contenders
from bench.transfers.contenders import (
    HOSTS,
    LAYERS,
    POOL_GB,
    Contender,
    DevicePool,
    LeftOut,
    contenders,
)
from bench.transfers.indices import SLOTS, Slots
from bench.transfers.interference import interference
from bench.transfers.targets import TOKENS
from bench.transfers.timing import Taken, pcie_ceiling, spread, taken
from hiqcache.codecs import get_codec
from hiqcache.record import Order, kv_parts

#: Repetitions by tokens. The spread is small (p10 and p90 are reported), long transfers take less.
REPEATS = {2048: 25, 128: 30, 512: 20, 8192: 10}
#: Repetitions with the stream held back, for so many times the longest that enqueueing took;
#: transfers longer than TOKENS have none.
AHEAD_REPEATS = 8
AHEAD = 1.2
#: Lengths in page_first by page size; layer_first has TOKENS alone.
LENGTHS = {64: tuple(REPEATS), 16: (TOKENS, 128), 1: tuple(REPEATS)}
#: Page sizes at which other work runs beside transfers.
BESIDE = (64, 1)
ORDERS: tuple[Order, ...] = ("page_first", "layer_first")


class WrongRowsError(Exception):
    """A contender restored other rows than its codec gives."""


def check(contender: Contender, pool: DevicePool) -> None:
    """Raise WrongRowsError unless a backup and a restore give what the codec says."""
    indices = contender.indices(1024, "random")[0]
    rows = indices.rows
    layer = LAYERS - 1
    sent = pool.k[layer][rows], pool.v[layer][rows]
    contender.run("backup", indices)
    for buffer in (*pool.k, *pool.v):
        buffer[rows] = torch.nan
    contender.run("restore", indices)
    for part, (buffer, given) in enumerate(zip((pool.k[layer], pool.v[layer]), sent, strict=True)):
        got, want, bound = buffer[rows], given, 0.0
        if contender.codec != "bf16":
            codec = get_codec(contender.codec)
            stores = codec.stores(kv_parts(*given.shape[1:]))[part]
            pages = given
            if codec.page_sizes is not None:
                pages = given.view(-1, contender.page, *given.shape[1:])
            want = stores.decode(*stores.encode(pages), given.dtype).view_as(given)
            # A rotation sums in some order: a code step here and there.
            bound = 0.0 if contender.codec == "int8" else 0.2
        worst = (got.float() - want.float()).abs().max().item()
        if not worst <= bound:
            raise WrongRowsError(f"**restored rows are off by {worst}**")


def checked(
    given: list[Contender], pool: DevicePool, order: Order
) -> tuple[list[Contender], list[LeftOut]]:
    """Who restores what it should, and who does not."""
    right, wrong = [], []
    for contender in given:
        try:
            check(contender, pool)
            right.append(contender)
        except WrongRowsError as error:
            name = contender.codec, contender.transfer
            wrong.append(LeftOut(contender.page, order, *name, str(error)))
            # The next is to find rows, not what this one left.
            for buffer in (*pool.k, *pool.v):
                buffer.normal_()
    return right, wrong


def measure(
    direction: str,
    tokens: int,
    slots: Slots,
    order: Order,
    given: list[Contender],
    ceiling: float,
) -> list[dict[str, Any]]:
    """Rows of the result for one setting; ``ceiling``: the link's GB/s in this direction."""
    sets = [contender.indices(tokens, slots) for contender in given]
    times: list[list[Taken]] = [[] for _ in given]
    ahead: list[list[float]] = [[] for _ in given]
    for repeat in range(-2, REPEATS[tokens]):  # two to warm up
        for contender, chosen, found in zip(given, sets, times, strict=True):
            took = taken(partial(contender.run, direction, chosen[repeat % len(chosen)]))
            if repeat >= 0:
                found.append(took)
    for repeat in range(AHEAD_REPEATS if tokens <= TOKENS else 0):
        for contender, chosen, found, held in zip(given, sets, times, ahead, strict=True):
            work = partial(contender.run, direction, chosen[repeat % len(chosen)])
            held.append(taken(work, AHEAD * max(each.host_ms for each in found)).ms)
    return [
        _row(contender, found, ceiling * 1e6 / tokens)
        | {"direction": direction, "tokens": tokens, "slots": slots, "layout": order}
        # What SGLang moved its own rows with.
        | {"kernel": contender.kernels.get(direction)}
        | {"ms_ahead": round(statistics.median(held), 4) if held else None}
        for contender, found, held in zip(given, times, ahead, strict=True)
    ]


def _row(contender: Contender, found: list[Taken], ceiling: float) -> dict[str, Any]:
    """``ceiling``: the link's bytes per token and millisecond."""
    times = spread([each.ms for each in found])
    return {
        "codec": contender.codec,
        "transfer": contender.transfer,
        "page": contender.page,
        **times,
        "host_ms": round(statistics.median(each.host_ms for each in found), 4),
        "bytes_per_token": contender.bytes_per_token,
        "pcie_share": round(contender.bytes_per_token / times["ms_median"] / ceiling, 4),
        "staging_bytes": contender.mover.staging_bytes,
    }


def run(out: Path, pages: Sequence[int]) -> bool:
    """Measure everything, and write ``out`` after every setting; whether all rows were right."""
    # Brings SGLang in, which takes seconds: not for --report-only.
    from bench.transfers.stock import host_memory

    compile_contenders(pages, ORDERS)
    # A server's transfers have a stream of their own, and not the default one.
    torch.cuda.set_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
    hosts = {key: host_memory(POOL_GB * 10**9) for key in HOSTS}
    pool = DevicePool()
    ceiling = pcie_ceiling(hosts[HOSTS[0]])
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.transfers", *sys.argv[1:]]),
        "versions": environment.versions(),
        "environment": environment.describe(),
        "card": torch.cuda.get_device_name(),
        "pool_gb": POOL_GB,
        "pcie_gbps": ceiling,
        "left_out": [],
        "rows": [],
        "beside": [],
    }
    print(f"{result['card']}: {ceiling}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    right = True

    def save() -> None:
        out.write_text(json.dumps(result, indent=1) + "\n")

    for page in pages:
        for order in ORDERS:
            every, left_out = contenders(order, page, pool, hosts)
            given, wrong = checked(every, pool, order)
            right &= not wrong
            result["left_out"] += [each._asdict() for each in (*left_out, *wrong)]
            print(*left_out, *wrong, sep="\n", flush=True)
            for tokens in LENGTHS[page] if order == "page_first" else (TOKENS,):
                for slots in SLOTS:
                    for direction, way in (("backup", "d2h"), ("restore", "h2d")):
                        rows = [
                            row
                            for turns in (_fast(given), _slow(given))
                            for row in measure(direction, tokens, slots, order, turns, ceiling[way])
                        ]
                        result["rows"] += rows
                        save()
                        print(
                            f"{page} {order} {tokens} {slots} {direction}:",
                            *(f"{r['codec']}/{r['transfer']} {r['ms_median']:.3f}" for r in rows),
                            flush=True,
                        )
            if order == "page_first" and page in BESIDE:
                chosen = _fast(given)
                sets = [contender.indices(TOKENS, "sequential")[0] for contender in chosen]
                for row in interference(chosen, sets):
                    result["beside"].append(row)
                    save()
                    print(row, flush=True)
            every[0].mover.close()  # type: ignore[attr-defined]
    return right


def _fast(given: Sequence[Contender]) -> list[Contender]:
    return [each for each in given if each.transfer != "mover"]


def _slow(given: Sequence[Contender]) -> list[Contender]:
    return [each for each in given if each.transfer == "mover"]


def _pages(given: str) -> tuple[int, ...]:
    pages = [page.strip() for page in given.split(",")]
    known = {str(page): page for page in LENGTHS}
    if not known.keys() >= set(pages):
        raise argparse.ArgumentTypeError(
            f"{given!r}: give page sizes out of {', '.join(known)}, with commas between"
        )
    return tuple(known[page] for page in dict.fromkeys(pages))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.transfers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("results/h200/transfers.json"))
    parser.add_argument(
        "--pages", type=_pages, default=tuple(LENGTHS), help="page sizes, in this order"
    )
    parser.add_argument("--report-only", action="store_true", help="remake table and plot")
    options = parser.parse_args()
    right = True
    if not options.report_only:
        if not torch.cuda.is_available():
            parser.error("needs a CUDA GPU; a table and a plot alone: --report-only")
        right = run(options.out, options.pages)
    print(report.write(options.out))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
