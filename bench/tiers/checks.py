"""What must hold for a run to count: the server is what its layout says and did what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from bench.lab.arms import Arm
from bench.lab.client import Timing
from bench.lab.server_metrics import (
    CAPACITY,
    FETCHED_TOKENS,
    RESTORED_BYTES,
    RESTORED_TOKENS,
    STORED_BYTES,
    STORED_TOKENS,
    WRITTEN_TOKENS,
)
from bench.tiers.plan import Experiment
from hiqcache.geometry import KVGeometry

L3_COUNTERS = (WRITTEN_TOKENS, FETCHED_TOKENS)
COUNTERS = (RESTORED_TOKENS, RESTORED_BYTES, STORED_TOKENS, STORED_BYTES, *L3_COUNTERS)

#: SGLang restores for a request that it then puts off, and counts that again: a few in a thousand.
RESTORED_APART = 0.02


def reasons_invalid(
    experiment: Experiment,
    arm: Arm,
    geometry: KVGeometry,
    timings: Sequence[Timing],
    before: Mapping[str, float],
    after: Mapping[str, float],
) -> list[str]:
    """Why a run does not count; empty where it does.

    ``before`` and ``after``: the server's metrics around the run, fill included.
    """
    reasons = []
    capacity, expected = after.get(CAPACITY), experiment.capacity(arm, geometry)
    if capacity != expected:
        reasons.append(f"L2 holds {capacity} tokens where the layout gives {expected}")
    layout = experiment.bytes_per_token(arm, geometry)
    for what, tokens_name, bytes_name in (
        ("restored", RESTORED_TOKENS, RESTORED_BYTES),
        ("stored", STORED_TOKENS, STORED_BYTES),
    ):
        tokens, moved = (_delta(before, after, name) for name in (tokens_name, bytes_name))
        if tokens and round(moved / tokens, 3) != layout:
            reasons.append(
                f"it {what} {moved / tokens:.1f} B per token where the layout takes {layout} B"
            )
    # What comes from L3 is restored from L2 then.
    reported = sum(timing.host + timing.storage for timing in timings)
    restored = _delta(before, after, RESTORED_TOKENS)
    if restored < reported * (1 - RESTORED_APART):
        reasons.append(
            f"requests report {reported} tokens from L2 and L3, the server {restored:.0f}"
        )
    if _delta(before, after, STORED_TOKENS) == 0:
        reasons.append("nothing was stored to L2")
    return reasons


def reasons_disturbed(timings: Sequence[Timing], held_up: float) -> list[str]:
    """Why a run's times are not the server's: the client stood still longer than a usual TTFT.

    ``held_up``: the longest such time, in seconds.
    """
    usual = median(timing.ttft for timing in timings)
    if held_up <= usual:
        return []
    return [f"the load generator was held up for {held_up:.3f} s; a usual TTFT is {usual:.3f} s"]


def deltas(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What the tiers' counters counted during a run, and their gauges after it."""
    kept = ("sglang:load_back", "sglang:hicache", "hiqcache_", *L3_COUNTERS)
    return {
        name: value if _is_gauge(name) else value - before.get(name, 0.0)
        for name, value in after.items()
        if name.startswith(kept) and not name.endswith("_created")
    }


def _is_gauge(name: str) -> bool:
    return not name.endswith(("_total", "_sum", "_count"))


def _delta(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)
