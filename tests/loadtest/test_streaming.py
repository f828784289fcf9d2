"""The token clock, against a server on loopback that streams, breaks off, stalls and fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from prometheus_client import generate_latest

from loadtest.streaming import Sample, direct_session, send
from loadtest.summary import Summary, percentiles
from loadtest.telemetry import Telemetry
from loadtest.workloads import Request

Script = Callable[["Handler"], None]


def chunk(tokens: int, finish: str | None = None, text: str = "x", **more: Any) -> dict[str, Any]:
    """A completion chunk after which ``tokens`` tokens are there."""
    return {
        "choices": [{"text": text, "finish_reason": finish}],
        "usage": {"prompt_tokens": 9, "completion_tokens": tokens},
        **more,
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).script(self)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def event(self, data: dict[str, Any] | str) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        self.write(f"data: {text}\n\n".encode())

    def end(self) -> None:
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: Any) -> None:
        """No line per request."""


@pytest.fixture
def ask() -> Iterator[Callable[..., Sample]]:
    """Sends a request to a server that follows a script."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def send_one(script: Script, timeout: float = 5.0) -> Sample:
        Handler.script = staticmethod(script)  # type: ignore[assignment]
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with direct_session() as session:
            return send(session, url, "arm", "load", Request(8, tokens=(1, 2)), timeout)

    yield send_one
    server.shutdown()
    server.server_close()


def test_tokens_are_timed_when_they_arrive(ask: Callable[..., Sample]) -> None:
    def script(handler: Handler) -> None:
        handler.begin()
        time.sleep(0.3)
        handler.event(chunk(1))
        time.sleep(0.2)
        # Two tokens in one chunk: two gaps of half the time.
        handler.event(chunk(3, "length"))
        details = {"cached_tokens_details": {"device": 2, "host": 5}}
        handler.event({"choices": [], "usage": chunk(3)["usage"], "sglext": details})
        handler.event("[DONE]")
        handler.end()

    sample = ask(script)
    assert (sample.outcome, sample.detail) == ("ok", "")
    assert (sample.prompt_tokens, sample.output_tokens, sample.text) == (9, 3, "xx")
    assert (sample.cached_device, sample.cached_host) == (2, 5)
    # Lower bounds only: the server slept that long, and the machine may be slower.
    assert sample.ttft >= 0.3
    assert len(sample.itl) == 2
    assert sum(sample.itl) >= 0.19
    assert sample.itl[0] == sample.itl[1]
    assert sample.e2e >= sample.ttft + sum(sample.itl)
    assert sample.tpot == pytest.approx((sample.e2e - sample.ttft) / 2)


def test_an_event_may_come_in_pieces_and_several_at_once(ask: Callable[..., Sample]) -> None:
    def script(handler: Handler) -> None:
        handler.begin()
        text = f"data: {json.dumps(chunk(1))}\n\n".encode()
        handler.write(text[:20])
        handler.write(text[20:] + f"data: {json.dumps(chunk(2, 'stop'))}\n\ndata: [DO".encode())
        handler.write(b"NE]\n\n")
        handler.end()

    sample = ask(script)
    assert sample.outcome == "ok"
    assert sample.output_tokens == 2


def breaks_off(handler: Handler) -> None:
    handler.begin()
    handler.event(chunk(1))
    handler.close_connection = True


def ends_early(handler: Handler) -> None:
    handler.begin()
    handler.event(chunk(1))
    handler.end()


def stalls(handler: Handler) -> None:
    handler.begin()
    handler.event(chunk(1))
    time.sleep(1.5)


def drips(handler: Handler) -> None:
    handler.begin()
    for tokens in range(1, 12):
        handler.event(chunk(tokens))
        time.sleep(0.2)


def refuses(handler: Handler) -> None:
    handler.send_response(503)
    handler.send_header("Content-Length", "4")
    handler.end_headers()
    handler.wfile.write(b"busy")


def fails_inside(handler: Handler) -> None:
    handler.begin()
    handler.event(chunk(1))
    handler.event({"error": {"message": "out of memory"}})
    handler.end()


def aborts(handler: Handler) -> None:
    handler.begin()
    handler.event(chunk(1, "abort"))
    handler.event("[DONE]")
    handler.end()


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (breaks_off, "truncated"),
        (ends_early, "truncated"),
        (stalls, "timeout"),
        (drips, "timeout"),
        (refuses, "error"),
        (fails_inside, "error"),
        (aborts, "error"),
    ],
)
def test_failures_are_told_apart_and_enter_no_latency(
    ask: Callable[..., Sample], script: Script, outcome: str
) -> None:
    sample = ask(script, timeout=0.8)
    assert sample.outcome == outcome, sample.detail
    assert sample.detail

    summary, telemetry = Summary(), Telemetry()
    telemetry.expect("load", "arm")
    for observer in (summary.add, telemetry.observe):
        observer(sample)
    figures = summary.to_dict()["load"]["arm"]
    assert figures["requests"][outcome] == 1
    assert not any(figures["seconds"].values())
    page = generate_latest(telemetry.registry).decode()
    labels = f'arm="arm",outcome="{outcome}",workload="load"'
    assert f"hiqcache_load_requests_total{{{labels}}} 1.0" in page
    assert 'hiqcache_load_ttft_seconds_count{arm="arm",workload="load"} 0.0' in page


def test_counts_that_a_server_leaves_open_change_nothing(ask: Callable[..., Sample]) -> None:
    def script(handler: Handler) -> None:
        handler.begin()
        handler.event({"choices": [{"text": None, "delta": None, "finish_reason": None}]})
        handler.event({"usage": {"prompt_tokens": None, "completion_tokens": None}})
        handler.event({**chunk(2, "stop"), "sglext": {"cached_tokens_details": None}})
        handler.event({"choices": None, "usage": None, "sglext": None, "error": None})
        handler.event({"sglext": {"cached_tokens_details": {"device": None, "host": None}}})
        handler.event("[DONE]")
        handler.end()

    sample = ask(script)
    assert (sample.outcome, sample.detail) == ("ok", "")
    assert (sample.prompt_tokens, sample.output_tokens, sample.cached_host) == (9, 2, 0)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                (
                    *("choices", "usage", "sglext", "error", "text", "delta", "content"),
                    *("finish_reason", "completion_tokens", "prompt_tokens", "device", "host"),
                    "cached_tokens_details",
                )
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(event=_JSON)
@example(event=None)
@example(event={"choices": [None]})
@example(event={"usage": {"completion_tokens": "3"}})
@example(event={"usage": {"completion_tokens": 3.5}})
@example(event={"usage": {"completion_tokens": 10**15}})
@example(event={"usage": {"prompt_tokens": -1}})
@example(event={"choices": [{"text": 7}]})
@example(event={"choices": {"text": "x"}})
def test_whatever_an_event_holds_nothing_is_raised(
    ask: Callable[..., Sample], event: object
) -> None:
    def script(handler: Handler) -> None:
        handler.begin()
        handler.event(chunk(1))
        handler.event(json.dumps(event))
        handler.event(chunk(2, "stop"))
        handler.event("[DONE]")
        handler.end()

    sample = ask(script)
    assert sample.outcome in ("ok", "error")
    # What came must go into the figures and to Locust's master.
    assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == replace(sample, text="")
    Summary().add(sample)
    Telemetry().observe(sample)


def test_brackets_without_end_are_an_error(ask: Callable[..., Sample]) -> None:
    def script(handler: Handler) -> None:
        handler.begin()
        handler.event(chunk(1))
        handler.event("[" * 200_000)
        handler.end()

    sample = ask(script)
    assert (sample.outcome, sample.output_tokens) == ("error", 1)


def test_a_refused_connection_is_an_error() -> None:
    with direct_session() as session:
        sample = send(session, "http://127.0.0.1:1", "arm", "load", Request(1, tokens=(1,)), 2.0)
    assert sample.outcome == "error"


def test_percentiles_interpolate() -> None:
    assert percentiles([]) == {}
    found = percentiles(range(101))
    assert (found["mean"], found["p50"], found["p99"]) == (50, 50, 99)
    assert percentiles([1.0, 2.0])["p50"] == 1.5
