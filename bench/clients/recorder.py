"""Stands between a client and a server, hands every byte on, and times streams with our clock."""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from loadtest.token_times import TokenTimes

#: Headers that belong to a connection, not to what it carries.
_OWN = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@dataclass
class Record(TokenTimes):
    """One streamed request: its times, and where its prompt's tokens came from."""

    path: str
    ended: bool = False
    cached: int = 0
    _buffer: bytes = field(default=b"", repr=False)

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes of the stream, which came ``now`` (seconds from the request)."""
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line.removeprefix(b"data:").strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.ended = True
            self.end(now)
            return
        event = json.loads(payload)
        usage = event.get("usage") or event.get("meta_info") or {}
        self.cached = max(self.cached, _cached(event, usage))
        if any(_holds_text(choice) for choice in event.get("choices", ())) or event.get("text"):
            # One chunk a token, unless the server says how many it has sent.
            self.chunk(int(usage.get("completion_tokens") or self.output_tokens + 1), now)


def _cached(event: dict[str, Any], usage: dict[str, Any]) -> int:
    """Tokens from a cache, in whichever of SGLang's three places the request had them put."""
    details = (event.get("sglext") or {}).get("cached_tokens_details")
    if details:
        return sum(int(details.get(tier) or 0) for tier in ("device", "host", "storage"))
    return int((usage.get("prompt_tokens_details") or usage).get("cached_tokens") or 0)


def _holds_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


@dataclass
class Recorder:
    """A server on loopback in front of the one at ``upstream``; ``records`` is what it saw."""

    upstream: str
    port: int
    records: list[Record] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def figures(self) -> dict[str, float]:
        """Medians in seconds over whole streams, and cached tokens in all."""
        whole = [record for record in self.records if record.ended and record.output_tokens > 1]
        if not whole:
            raise RuntimeError("no whole stream passed by")
        tpot = [record.tpot for record in whole if record.tpot is not None]
        return {
            "requests": len(whole),
            "ttft_s": statistics.median(record.ttft for record in whole),
            "tpot_s": statistics.median(tpot),
            "cached_tokens": sum(record.cached for record in whole),
        }

    @contextlib.contextmanager
    def serving(self) -> Iterator[Recorder]:
        """Serve in the background until left."""
        loop = asyncio.new_event_loop()
        ready, failed = threading.Event(), []
        stop = asyncio.Event()

        async def run() -> None:
            # No proxy of the environment: trust_env is off unless asked for.
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
                application = web.Application(client_max_size=2**26)

                async def pass_on(request: web.Request) -> web.StreamResponse:
                    return await self._pass_on(request, session)

                application.router.add_route("*", "/{path:.*}", pass_on)
                runner = web.AppRunner(application)
                await runner.setup()
                try:
                    await web.TCPSite(runner, "127.0.0.1", self.port).start()
                    ready.set()
                    await stop.wait()
                finally:
                    await runner.cleanup()

        def serve() -> None:
            try:
                loop.run_until_complete(run())
            except BaseException as error:
                failed.append(error)
            finally:
                ready.set()

        thread = threading.Thread(target=serve)
        thread.start()
        ready.wait()
        if failed:
            raise failed[0]
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
            if failed:
                raise failed[0]

    async def _pass_on(
        self, request: web.Request, session: aiohttp.ClientSession
    ) -> web.StreamResponse:
        start = time.perf_counter()
        body = await request.read()
        headers = {k: v for k, v in request.headers.items() if k.lower() not in _OWN}
        async with session.request(
            request.method,
            f"{self.upstream}{request.rel_url}",
            data=body,
            # As it is, so that its events can be read.
            headers={**headers, "Accept-Encoding": "identity"},
        ) as answer:
            back = {k: v for k, v in answer.headers.items() if k.lower() not in _OWN}
            response = web.StreamResponse(status=answer.status, headers=back)
            record = None
            if answer.content_type == "text/event-stream":
                record = Record(path=request.path)
                self.records.append(record)
            # A client may leave once it has what it wants, which is after [DONE], in the middle, or
            # before there is anything: then the record has not ended.
            with contextlib.suppress(ConnectionResetError):
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    now = time.perf_counter() - start
                    await response.write(data)
                    if record:
                        record.feed(data, now)
                await response.write_eof()
            return response
