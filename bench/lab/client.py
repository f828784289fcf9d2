"""One asynchronous client for a server's own API: streams timed at the token, flush, metrics."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from bench.lab.server_metrics import totals
from loadtest.token_times import TokenTimes

#: SGLang refuses to flush while a request or a backup is in flight.
FLUSH_WITHIN_S = 60.0


class BenchError(RuntimeError):
    """A server did not do what a measurement needs; the text says what."""


@dataclass
class Timing(TokenTimes):
    """One answered request, and when its tokens came.

    device, host, storage: prompt tokens that came from L1, from L2 and from L3.
    """

    prompt: int
    device: int = 0
    host: int = 0
    storage: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: times in milliseconds."""
        return {
            "prompt": self.prompt,
            "device": self.device,
            "host": self.host,
            "storage": self.storage,
            "output": self.output_tokens,
            "ttft_ms": round(self.ttft * 1e3, 3),
            "e2e_ms": round(self.e2e * 1e3, 3),
            "itl_ms": [round(gap * 1e3, 2) for gap in self.itl],
        }


class Client:
    """Talks to one server; an asynchronous context manager."""

    def __init__(self, url: str, timeout_s: float = 300) -> None:
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        self._session = aiohttp.ClientSession(
            base_url=self._url,
            timeout=self._timeout,
            # SGLang closes a connection that was idle for 5 s; no request must go out on one.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=3),
            read_bufsize=1 << 20,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._open.close()

    @property
    def _open(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use the client as a context manager"
        return self._session

    async def generate(self, tokens: Sequence[int], output: int) -> Timing:
        """Stream ``output`` tokens after ``tokens``. Raises BenchError, aiohttp.ClientError."""
        # Encoded before the clock starts: it is the client's work, not the server's.
        body = json.dumps(
            {
                "input_ids": list(tokens),
                "sampling_params": {
                    "temperature": 0,
                    "max_new_tokens": output,
                    "ignore_eos": True,
                },
                "stream": True,
            }
        ).encode()
        timing = Timing(len(tokens))
        start = time.perf_counter()
        async with self._open.post(
            "/generate", data=body, headers={"Content-Type": "application/json"}
        ) as response:
            if response.status != 200:
                raise BenchError(f"/generate: HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                now = time.perf_counter()
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    timing.end(now - start)
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise BenchError(f"/generate: {chunk['error']}")
                _take(timing, chunk["meta_info"], now - start)
        if timing.output_tokens != output or not timing.e2e:
            raise BenchError(
                f"/generate: {timing.output_tokens} of {output} tokens came, and "
                f"{'its' if timing.e2e else 'no'} [DONE]"
            )
        return timing

    async def flush(self) -> None:
        """Empty both tiers. Raises BenchError where the server stays busy."""
        deadline = time.monotonic() + FLUSH_WITHIN_S
        while True:
            async with self._open.post("/flush_cache") as response:
                if response.status == 200:
                    return
                answer = await response.text()
            if time.monotonic() > deadline:
                raise BenchError(f"/flush_cache: HTTP {response.status}: {answer}")
            await asyncio.sleep(0.2)

    async def clear_storage(self) -> None:
        """Empty L3, once nothing is in flight. Raises BenchError."""
        async with self._open.post("/hicache/storage-backend/clear") as response:
            if response.status != 200:
                raise BenchError(
                    f"/hicache/storage-backend/clear: HTTP {response.status}: "
                    f"{await response.text()}"
                )

    async def freeze_gc(self) -> None:
        """Have the server's processes leave what they hold out of later garbage collections.

        A full collection stops one for tenths of a second, in a run of a few. Raises BenchError.
        """
        async with self._open.post("/freeze_gc") as response:
            if response.status != 200:
                raise BenchError(f"/freeze_gc: HTTP {response.status}: {await response.text()}")

    async def metrics(self) -> dict[str, float]:
        """The server's counters and gauges, as server_metrics.totals reads them."""
        async with self._open.get("/metrics") as response:
            return totals(await response.text())


def _take(timing: Timing, meta: dict[str, Any], now: float) -> None:
    """Enter a chunk."""
    cached = meta.get("cached_tokens_details") or {}
    timing.device = int(cached.get("device", timing.device))
    timing.host = int(cached.get("host", timing.host))
    timing.storage = int(cached.get("storage", timing.storage))
    timing.chunk(int(meta["completion_tokens"]), now)


@dataclass
class HeldUp:
    """The longest time for which this process did not get round to anything, in seconds."""

    seconds: float = 0.0


#: How often this process looks whether it is held up.
_BEAT_S = 0.005


@asynccontextmanager
async def undisturbed() -> AsyncIterator[HeldUp]:
    """A measurement, without garbage collection, that knows how long this process was held up."""
    held_up = HeldUp()

    async def beat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(_BEAT_S)
            now = time.perf_counter()
            held_up.seconds = max(held_up.seconds, now - last - _BEAT_S)
            last = now

    collected = gc.isenabled()
    gc.collect()
    gc.disable()
    beating = asyncio.create_task(beat())
    try:
        yield held_up
    finally:
        beating.cancel()
        if collected:
            gc.enable()


async def closed_loop(
    client: Client, prompts: Sequence[Sequence[int]], output: int, concurrency: int
) -> tuple[list[Timing], float]:
    """Send all ``prompts`` in order, ``concurrency`` at a time; timings and seconds in all."""
    timings: list[Timing | None] = [None] * len(prompts)
    waiting = iter(enumerate(prompts))

    async def worker() -> None:
        for index, prompt in waiting:
            timings[index] = await client.generate(prompt, output)

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(worker())
    elapsed = time.perf_counter() - started
    return [timing for timing in timings if timing is not None], elapsed
