"""Brings a server to where a measurement can begin, and waits until it has counted what it did."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from bench.lab.client import Client, closed_loop
from bench.tiers.checks import COUNTERS
from bench.tiers.plan import Point

#: Prompts of a warm-up, visited twice: enough to leave L1 and be restored in full batches.
WARM_UP_GROUPS = 12
WARM_UP_SEED = 10_000
WARM_UP_BATCHES = 8

SETTLED_WITHIN_S = 10.0


async def warm_up(client: Client, point: Point) -> None:
    """Compile kernels and fill buffers: a few prompts, visited until they are restored.

    Then some batches of the point's own requests. What the server holds after that is kept out of
    its garbage collections.
    """
    groups = min(WARM_UP_GROUPS, point.groups)
    requests = WARM_UP_BATCHES * point.concurrency
    fill, as_measured = replace(point, groups=groups, fill=True, requests=requests).prompts(
        WARM_UP_SEED
    )
    for _ in range(2):
        await closed_loop(client, fill, max(2, point.output), point.concurrency)
    await closed_loop(client, as_measured, point.output, point.concurrency)
    await client.freeze_gc()


async def settled(client: Client) -> dict[str, float]:
    """The metrics when the counters of transfers stand still: they are counted a little later."""
    deadline = time.monotonic() + SETTLED_WITHIN_S
    earlier = await client.metrics()
    while True:
        await asyncio.sleep(0.5)
        later = await client.metrics()
        moving = [name for name in COUNTERS if later.get(name) != earlier.get(name)]
        if not moving or time.monotonic() > deadline:
            return later
        earlier = later
