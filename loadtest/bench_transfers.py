"""Times backups and restores on a GPU, SGLang's own next to ours.

`python -m loadtest.bench_transfers` needs a CUDA GPU and SGLang. Measures, for Qwen3-8B's KV shape
(36 layers, 8 KV heads of 128, bf16) and host pools of 8 GB:

- the PCIe ceiling: copies of 1 GiB of pinned memory, each way;
- backup and restore of 128 to 8,192 tokens, sequential and random slots, both host layouts, by
  SGLang's own pool (codec bf16, transfer stock), mover and fused;
- what a GEMM and a decode step lose while a transfer runs beside them.

A time is that of the stream: from an event before the calls to one after, the stream empty before.
The contenders take turns within a repetition. Writes JSON after every setting; the table and the
plot beside it are made from that file, also alone: `--report-only`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from hiqcache.codecs import get_codec
from hiqcache.record import Order, RecordLayout, kv_parts, tokens_in_gigabytes
from hiqcache.transfers.base import Arena
from loadtest import transfer_report
from loadtest.experiments import environment

#: Qwen3-8B.
LAYERS, HEADS, HEAD_DIM = 36, 8, 128
#: Rows of the device pool: twice the largest transfer.
DEVICE_SLOTS = 16_384
#: --hicache-size, decimal GB.
POOL_GB = 8
#: Repetitions by tokens. The spread is small (p10 and p90 are reported), long transfers take less.
REPEATS = {128: 40, 512: 40, 2048: 30, 8192: 15}
#: Index sets in rotation, so that no repetition finds its rows in the GPU's L2 (60 MB).
INDEX_SETS = 4
CEILING_BYTES = 1 << 30


class Indices(NamedTuple):
    """Host slots and device rows of a transfer; the host slots on the CPU too."""

    host: torch.Tensor
    rows: torch.Tensor
    host_on_cpu: torch.Tensor


class Mover(Protocol):
    """What is timed: a Transfer, or SGLang's own pool behind the same calls."""

    @property
    def staging_bytes(self) -> int: ...
    def backup(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> None: ...
    def restore(
        self, layer: int, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> None: ...


class Contender(NamedTuple):
    """One way to keep rows, with a host pool of ``slots`` tokens."""

    codec: str
    transfer: str
    mover: Mover
    bytes_per_token: int
    slots: int
    #: Whether SGLang gives a backup its host slots on the CPU: stock, page_first.
    cpu_slots: bool = False

    def run(self, direction: str, indices: Indices) -> None:
        """Enqueue a whole backup, or the restore of every layer."""
        if direction == "backup":
            host = indices.host_on_cpu if self.cpu_slots else indices.host
            self.mover.backup(host, indices.rows)
        else:
            for layer in range(LAYERS):
                self.mover.restore(layer, indices.host, indices.rows)


class DevicePool:
    """Random K and V rows for all layers, ``[slots, heads, head_dim]`` each."""

    def __init__(self) -> None:
        shape = (DEVICE_SLOTS, HEADS, HEAD_DIM)
        self.k, self.v = (
            [torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]
            for _ in range(2)
        )


def timing_event() -> torch.cuda.Event:
    """An event whose distance to another can be asked for."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of the current stream for ``work``."""
    start, end = timing_event(), timing_event()
    torch.cuda.synchronize()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def spread(times: Sequence[float]) -> dict[str, float]:
    """Median, p10 and p90 in milliseconds."""
    tenths = statistics.quantiles(times, n=10, method="inclusive")
    return {
        "ms_median": round(statistics.median(times), 4),
        "ms_p10": round(tenths[0], 4),
        "ms_p90": round(tenths[-1], 4),
    }


def pcie_ceiling(host: torch.Tensor) -> dict[str, float]:
    """GB/s of plain copies between pinned ``host`` memory and the device, each way."""
    pinned = host[:CEILING_BYTES]
    device = torch.empty_like(pinned, device="cuda")
    times = {
        "h2d": [timed(lambda: device.copy_(pinned, non_blocking=True)) for _ in range(11)],
        "d2h": [timed(lambda: pinned.copy_(device, non_blocking=True)) for _ in range(11)],
    }
    return {way: round(CEILING_BYTES / statistics.median(t) / 1e6, 2) for way, t in times.items()}


#: Codec and transfer of ours, in the order of the tables.
OURS = (("int8", "mover"), ("int8", "fused"), ("int8-rot", "fused"))


def contenders(order: Order, pool: DevicePool, hosts: Sequence[torch.Tensor]) -> list[Contender]:
    """SGLang's own pool, and each of OURS in its own of ``hosts``, all of POOL_GB."""
    from hiqcache.sglang.jit_mover import JitMover
    from hiqcache.sglang.stock import StockTransfer
    from hiqcache.transfers.fused import FusedTransfer
    from hiqcache.transfers.mover import MoverTransfer

    row_bytes = 2 * LAYERS * HEADS * HEAD_DIM * 2
    slots = tokens_in_gigabytes(POOL_GB, row_bytes)
    stock = StockTransfer(pool.k, pool.v, 1, order, slots)
    found = [
        Contender(
            "bf16", "stock", stock, stock.bytes_per_token, slots, stock.backup_wants_cpu_slots
        )
    ]
    for (codec_name, transfer), host in zip(OURS, hosts, strict=True):
        codec = get_codec(codec_name)
        layout = RecordLayout(
            LAYERS,
            1,
            codec.row_formats(kv_parts(HEADS, HEAD_DIM)),
            order,
            "padded" if transfer == "mover" else "packed",
        )
        slots = layout.pages_in(len(host))
        arena = Arena(host[: layout.arena_bytes(slots)], layout, slots)
        mover: Mover = (
            MoverTransfer(codec, arena, (pool.k, pool.v), JitMover())
            if transfer == "mover"
            else FusedTransfer(codec, arena, (pool.k, pool.v))
        )
        found.append(Contender(codec_name, transfer, mover, layout.bytes_per_token, slots))
    return found


def index_sets(tokens: int, slots: str, host_slots: int) -> list[Indices]:
    """INDEX_SETS sets of host slots and device rows, both sequential or both random."""
    generator = torch.Generator().manual_seed(tokens)
    sets = []
    for index in range(INDEX_SETS):
        if slots == "random":
            host = torch.randperm(host_slots, generator=generator)[:tokens]
            device = torch.randperm(DEVICE_SLOTS, generator=generator)[:tokens]
        else:
            host = torch.arange(tokens) + (host_slots - tokens) * index // INDEX_SETS
            device = torch.arange(tokens) + (DEVICE_SLOTS - tokens) * index // INDEX_SETS
        sets.append(Indices(host.cuda(), device.cuda(), host))
    return sets


def check(contender: Contender, pool: DevicePool) -> None:
    """Raise SystemExit unless a backup and a restore give what the codec says."""
    tokens = 1024
    indices = index_sets(tokens, "random", contender.slots)[0]
    rows = indices.rows
    layer = LAYERS - 1
    sent = pool.k[layer][rows], pool.v[layer][rows]
    contender.run("backup", indices)
    for buffer in (*pool.k, *pool.v):
        buffer[rows] = torch.nan
    contender.run("restore", indices)
    for buffer, given in zip((pool.k[layer], pool.v[layer]), sent, strict=True):
        got, want, bound = buffer[rows], given, 0.0
        if contender.codec != "bf16":
            codec = get_codec(contender.codec)
            want = codec.decode(*codec.encode(given), given.dtype)
            # A rotation sums in some order: a code step here and there.
            bound = 0.0 if contender.codec == "int8" else 0.2
        worst = (got.float() - want.float()).abs().max().item()
        if not worst <= bound:
            sys.exit(f"{contender.codec} {contender.transfer}: restored rows are off by {worst}")


def measure(
    direction: str, tokens: int, slots: str, order: Order, given: list[Contender]
) -> list[dict[str, Any]]:
    """Rows of the result for one setting."""
    sets = [index_sets(tokens, slots, contender.slots) for contender in given]
    times: list[list[float]] = [[] for _ in given]
    for repeat in range(-2, REPEATS[tokens]):  # two to warm up
        for index, contender in enumerate(given):
            chosen = sets[index][repeat % INDEX_SETS]
            taken = timed(partial(contender.run, direction, chosen))
            if repeat >= 0:
                times[index].append(taken)
    return [
        {
            "codec": contender.codec,
            "transfer": contender.transfer,
            "direction": direction,
            "tokens": tokens,
            "slots": slots,
            "layout": order,
            **spread(taken),
            "bytes_per_token": contender.bytes_per_token,
            "staging_bytes": contender.mover.staging_bytes,
        }
        for contender, taken in zip(given, times, strict=True)
    ]


def versions() -> dict[str, str]:
    """Versions of what takes part."""
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for package in ("torch", "triton", "sglang"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def run(out: Path) -> None:
    """Measure everything, and write ``out`` after every setting."""
    # Both bring SGLang in, which takes seconds: not for --report-only.
    from hiqcache.sglang.stock import host_memory
    from loadtest.transfer_interference import interference

    # One each: in a shared one, a restore would read what another codec wrote there.
    hosts, pool = [host_memory(POOL_GB * 10**9) for _ in OURS], DevicePool()
    ceiling = pcie_ceiling(hosts[0])
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "loadtest.bench_transfers", *sys.argv[1:]]),
        "versions": versions(),
        "environment": environment.describe(),
        "card": torch.cuda.get_device_name(),
        "pcie_gbps": ceiling,
        "rows": [],
        "beside": [],
    }
    print(f"{result['card']}: {ceiling}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        out.write_text(json.dumps(result, indent=1) + "\n")

    orders: tuple[Order, ...] = ("page_first", "layer_first")
    for order in orders:
        given = contenders(order, pool, hosts)
        for contender in given:
            check(contender, pool)
        for tokens in REPEATS:
            for slots in ("sequential", "random"):
                for direction, way in (("backup", "d2h"), ("restore", "h2d")):
                    rows = measure(direction, tokens, slots, order, given)
                    for row in rows:
                        moved = tokens * row["bytes_per_token"] / row["ms_median"] / 1e6
                        row["pcie_share"] = round(moved / ceiling[way], 4)
                    result["rows"] += rows
                    save()
                    print(
                        f"{order} {tokens} {slots} {direction}:",
                        *(f"{r['codec']}/{r['transfer']} {r['ms_median']:.3f}" for r in rows),
                        flush=True,
                    )
        if order == "page_first":
            sets = [index_sets(2048, "sequential", contender.slots)[0] for contender in given]
            for row in interference(given, sets):
                result["beside"].append(row)
                save()
                print(row, flush=True)
        given[0].mover.close()  # type: ignore[attr-defined]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("results/h200/transfers.json"))
    parser.add_argument("--report-only", action="store_true", help="remake table and plot")
    options = parser.parse_args()
    if not options.report_only:
        if not torch.cuda.is_available():
            parser.error("needs a CUDA GPU; a table and a plot alone: --report-only")
        run(options.out)
    print(transfer_report.write(options.out))


if __name__ == "__main__":
    main()
