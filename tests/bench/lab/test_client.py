"""The load generator knows when it, and not the server, stood still."""

from __future__ import annotations

import asyncio
import gc
import time

from bench.lab.client import Timing, undisturbed
from bench.tiers.checks import reasons_disturbed


def test_it_notices_how_long_it_was_held_up() -> None:
    async def run(hold: float) -> float:
        async with undisturbed() as held_up:
            assert not gc.isenabled()
            await asyncio.sleep(0.05)
            time.sleep(hold)
            await asyncio.sleep(0.05)
        return held_up.seconds

    assert asyncio.run(run(0.3)) > 0.25
    assert gc.isenabled()


def test_a_run_counts_unless_a_pause_outlasts_a_usual_ttft() -> None:
    timings = [Timing(8, ttft=ttft) for ttft in (0.06, 0.07, 0.5)]
    assert reasons_disturbed(timings, 0.07) == []
    (reason,) = reasons_disturbed(timings, 0.43)
    assert reason == "the load generator was held up for 0.430 s; a usual TTFT is 0.070 s"
