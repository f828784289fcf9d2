"""Times backups and restores on a GPU, SGLang's own next to ours.

`python -m bench.transfers` needs a CUDA GPU and SGLang. Measures, for Qwen3-8B's KV shape
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
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.lab import environment
from bench.transfers import report
from bench.transfers.contenders import (
    INDEX_SETS,
    LAYERS,
    OURS,
    POOL_GB,
    Contender,
    DevicePool,
    contenders,
    index_sets,
)
from bench.transfers.interference import interference
from bench.transfers.timing import pcie_ceiling, spread, timed
from hiqcache.codecs import get_codec
from hiqcache.record import Order

#: Repetitions by tokens. The spread is small (p10 and p90 are reported), long transfers take less.
REPEATS = {128: 40, 512: 40, 2048: 30, 8192: 15}


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


def run(out: Path) -> None:
    """Measure everything, and write ``out`` after every setting."""
    # Brings SGLang in, which takes seconds: not for --report-only.
    from bench.transfers.stock import host_memory

    # One each: in a shared one, a restore would read what another codec wrote there.
    hosts, pool = [host_memory(POOL_GB * 10**9) for _ in OURS], DevicePool()
    ceiling = pcie_ceiling(hosts[0])
    result: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "bench.transfers", *sys.argv[1:]]),
        "versions": environment.versions(),
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
    print(report.write(options.out))


if __name__ == "__main__":
    main()
