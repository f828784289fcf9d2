"""What measuring costs: transfers of an observed host pool against the same pool unobserved.

    python -m bench.metrics_overhead [--tokens 2048] [--repeats 200] [--out FILE]

Both pools are the quantised one, of Qwen3-8B's shape, over the same device rows; their transfers
take turns, so that a drifting clock or a busy machine meets both. Times are of whole backups and
whole restores (all layers), from the first call until the stream has run dry; ``host_ms_more`` is
what the calls take longer on the host, most of it while the transfer runs. Metrics go to files, as
under a server. Run it on the GPU in question, or on a CPU with SGLANG_PLATFORM=hiqcache_cpu.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from bench.lab.shapes import QWEN3_8B

LAYERS = QWEN3_8B.layers
HEADS, HEAD_DIM = QWEN3_8B.parts[0].heads, QWEN3_8B.parts[0].width

#: The limit that the project sets itself.
LIMIT = 1.01


def main() -> int:
    """The exit status: 1 where a transfer loses more than the limit."""
    parser = argparse.ArgumentParser(prog="python -m bench.metrics_overhead", description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens a transfer (default 2048)")
    parser.add_argument("--repeats", type=int, default=200, help="pairs of each (default 200)")
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    arguments = parser.parse_args()
    os.environ["HIQCACHE_CODEC"] = arguments.codec
    with tempfile.TemporaryDirectory() as folder:
        # Before prometheus_client is imported, which chooses by it where values are kept.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        figures = measure(arguments.tokens, arguments.repeats)
    text = json.dumps(figures, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    worst = max(figures[way]["observed_over_plain"] for way in ("backup", "restore"))
    return 0 if worst <= LIMIT else 1


def measure(tokens: int, repeats: int) -> dict[str, Any]:
    """Median milliseconds of plain and observed transfers of ``tokens`` tokens, and their ratio."""
    import torch

    from bench.lab import environment
    from hiqcache.metrics import PoolLabels
    from hiqcache.sglang.host_pool import QuantisedMHATokenToKVPoolHost
    from hiqcache.sglang.observed import observed

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    info = device_rows(2 * tokens, device)
    # A scheduler has published ranks and model by the time it builds pools; nothing has here.
    labels = PoolLabels("int8", "measured", "kv", "0", "0", "0", "none")
    with mock.patch("hiqcache.sglang.observed.labels_of", return_value=labels):
        pools = {
            name: host_pool(info, cls, 2 * tokens)
            for name, cls in (
                ("plain", QuantisedMHATokenToKVPoolHost),
                ("observed", observed(QuantisedMHATokenToKVPoolHost)),
            )
        }
    generator = torch.Generator().manual_seed(0)
    device_indices = torch.randperm(2 * tokens, generator=generator)[:tokens].to(device)

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def timed(work: Callable[[], None]) -> tuple[float, float]:
        """Milliseconds until the stream ran dry, and until the calls had returned."""
        wait()
        start = time.perf_counter()
        work()
        returned = time.perf_counter()
        wait()
        return 1000 * (time.perf_counter() - start), 1000 * (returned - start)

    times: dict[str, dict[str, list[float]]] = {
        way: {name: [] for name in pools} for way in ("backup", "restore")
    }
    calls = copy.deepcopy(times)
    for repeat in range(repeats + 5):
        for name, pool in sorted(pools.items(), reverse=bool(repeat % 2)):
            slots = pool.alloc(tokens)
            host_indices = slots.to(device)

            def backup(pool: Any = pool, host: torch.Tensor = host_indices) -> None:
                pool.backup_from_device_all_layer(None, host, device_indices, "kernel")

            def restore(pool: Any = pool, host: torch.Tensor = host_indices) -> None:
                for layer in range(LAYERS):
                    pool.load_to_device_per_layer(None, host, device_indices, layer, "kernel")

            for way, work in (("backup", backup), ("restore", restore)):
                took, called = timed(work)
                if repeat >= 5:  # the first compile kernels
                    times[way][name].append(took)
                    calls[way][name].append(called)
            pool.free(slots)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "none"
    result: dict[str, Any] = {
        "command": "python -m bench.metrics_overhead " + " ".join(sys.argv[1:]),
        "gpu": gpu,
        "transfer": pools["plain"].transfer_name,
        "tokens": tokens,
        "repeats": repeats,
        "environment": environment.describe(),
    }
    for way, by_pool in times.items():
        medians = {name: statistics.median(values) for name, values in by_pool.items()}
        result[way] = {
            **{f"{name}_ms": round(value, 4) for name, value in medians.items()},
            "observed_over_plain": round(medians["observed"] / medians["plain"], 5),
            # What the scheduler's thread spends on measuring, beside the transfer.
            "host_ms_more": round(
                statistics.median(calls[way]["observed"]) - statistics.median(calls[way]["plain"]),
                4,
            ),
        }
    return result


def device_rows(slots: int, device: Any) -> Any:
    """Random rows of every layer, described as SGLang's device pool describes its own."""
    import torch

    from bench.transfers.stock import describe_rows

    def side() -> list[torch.Tensor]:
        shape = (slots, HEADS, HEAD_DIM)
        return [torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(LAYERS)]

    return describe_rows(side(), side(), page_size=1)


def host_pool(info: Any, cls: type, device_tokens: int) -> Any:
    """A host pool of ``cls`` for ``info``, twice the size of the device's."""
    return cls(
        info,
        2.0,
        0,
        1,
        "page_first",
        device_capacity_tokens=device_tokens,
        start_layer=0,
        end_layer=LAYERS,
    )


if __name__ == "__main__":
    sys.exit(main())
