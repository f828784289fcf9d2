"""The clock of transfers: time on a CUDA stream, and the ceiling that the link sets."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

CEILING_BYTES = 1 << 30
#: Cycles of a GPU per millisecond, at most.
CYCLES_PER_MS = 2_000_000


class Taken(NamedTuple):
    """Milliseconds of the stream, and of the CPU until all was enqueued."""

    ms: float
    host_ms: float


def timing_event() -> torch.cuda.Event:
    """An event whose distance to another can be asked for."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def hold(ms: float) -> None:
    """Hold the current stream back for ``ms`` milliseconds or somewhat longer."""
    torch.cuda._sleep(int(ms * CYCLES_PER_MS))  # type: ignore[no-untyped-call]


def taken(work: Callable[[], object], held_ms: float = 0.0) -> Taken:
    """What ``work`` takes on the current stream, which is empty before.

    With ``held_ms`` the stream is held back for so long, while the CPU enqueues.
    """
    start, end = timing_event(), timing_event()
    torch.cuda.synchronize()
    if held_ms:
        hold(held_ms)
    start.record()
    began = time.perf_counter()
    work()
    host_ms = 1e3 * (time.perf_counter() - began)
    end.record()
    torch.cuda.synchronize()
    return Taken(float(start.elapsed_time(end)), host_ms)


def timed(work: Callable[[], object]) -> float:
    """Milliseconds of the current stream for ``work``."""
    return taken(work).ms


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
