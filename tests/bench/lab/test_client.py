"""The bench's client: when tokens came, and when it, and not the server, stood still."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.lab.client import BenchError, Client, Timing, undisturbed
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


class _Stream(BaseHTTPRequestHandler):
    """SGLang's /generate: two tokens in the first chunk, a third later, then [DONE] (or not)."""

    done = True

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for tokens in (2, 3):
            meta = {"completion_tokens": tokens, "cached_tokens_details": {"device": 1, "host": 4}}
            self.wfile.write(f"data: {json.dumps({'meta_info': meta})}\n\n".encode())
            self.wfile.flush()
            time.sleep(0.1)
        if type(self).done:
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def stream() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Stream)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_the_benchs_times_are_those_of_the_load_generator(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def once() -> Timing:
        async with Client(stream) as client:
            return await client.generate([1, 2, 3, 4, 5, 6], 3)

    timing = asyncio.run(once())
    # The first chunk's second token adds no gap; the end is [DONE], 0.1 s after the last token.
    assert len(timing.itl) == 1
    assert timing.e2e >= timing.ttft + timing.itl[0] + 0.09
    assert timing.as_dict() == {
        **timing.as_dict(), "prompt": 6, "device": 1, "host": 4, "output": 3
    }  # fmt: skip
    monkeypatch.setattr(_Stream, "done", False)
    with pytest.raises(BenchError, match=r"3 of 3 tokens came, and no \[DONE\]"):
        asyncio.run(once())
