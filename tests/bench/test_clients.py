"""The recorder between clients and servers, and how figures are compared."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from bench.clients.__main__ import compared
from bench.clients.recorder import Record, Recorder
from bench.clients.report import table
from bench.lab.servers import free_port
from hiqcache import direct_http

CHAT = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "a"}}]},
    {"choices": [{"delta": {"content": "b"}}]},
    {"choices": [{"delta": {"content": "c"}}]},
]
USAGE = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 7}}}
EXTENSION = {
    "choices": [],
    "sglext": {"cached_tokens_details": {"device": 3, "host": 4, "storage": None}},
}
GENERATE = [
    {"text": "a", "meta_info": {"completion_tokens": 1, "cached_tokens": 7}},
    {"text": "abc", "meta_info": {"completion_tokens": 3, "cached_tokens": 7}},
]


def stream(events: list[dict[str, object]]) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


@pytest.mark.parametrize(
    "events", [[*CHAT, USAGE], [*CHAT, EXTENSION], GENERATE], ids=["chat", "sglext", "generate"]
)
def test_a_stream_in_pieces_gives_times_and_cached_tokens(events: list[dict[str, object]]) -> None:
    record = Record(path="/x")
    data = stream(events)
    for start in range(0, len(data), 11):
        record.feed(data[start : start + 11], now=1.0 + start / len(data))
    assert record.ended
    assert record.output_tokens == 3
    assert record.cached == 7
    assert 1.0 <= record.ttft < 2.0


class _Upstream(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body.keys() <= {"stream", "times", "after"}
        time.sleep(body.get("after", 0))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        data = stream(GENERATE * body.get("times", 1))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def upstream() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Upstream)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_recorder_hands_every_byte_on(upstream: str) -> None:
    with Recorder(upstream, free_port()).serving() as recorder:
        for _ in range(2):
            answer = direct_http.post(f"{recorder.url}/generate", {"stream": True})
            assert answer.body == stream(GENERATE)
    found = recorder.figures()
    assert (found["requests"], found["cached_tokens"]) == (2, 14)


@pytest.mark.parametrize(
    ("asked", "read"), [({"times": 50_000}, 100), ({"after": 0.3}, 0)], ids=["amid", "before"]
)
def test_a_client_that_leaves_is_no_error_and_no_figure(
    asked: dict[str, float], read: int, upstream: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Recorder(upstream, free_port()).serving() as recorder:
        body = json.dumps({"stream": True, **asked})
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", recorder.port)) as leaving:
                head = f"POST /x HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                leaving.sendall(f"{head}{body}".encode())
                leaving.recv(read)
        direct_http.post(f"{recorder.url}/generate", {"stream": True})
    assert len(recorder.records) == 4
    assert recorder.figures()["requests"] == 1
    assert "Error handling request" not in caplog.text


def test_no_stream_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no whole stream"):
        Recorder("http://127.0.0.1:9", 1).figures()


def test_what_is_more_than_a_twentieth_apart_does_not_agree() -> None:
    ours = {"requests": 48, "ttft_s": 0.100, "tpot_s": 0.010}
    found = compared({"requests": 48, "ttft_s": 0.106}, ours)
    assert {name: row["agrees"] for name, row in found.items()} == {
        "requests": True,
        "ttft_s": False,
    }


def test_a_report_says_how_far_apart_the_figures_are() -> None:
    ours = {"requests": 24, "ttft_s": 0.100, "tpot_s": 0.010, "cached_tokens": 5000}
    figures = compared({**ours, "ttft_s": 0.102}, ours)
    without = {name: figures[name] for name in ("requests", "ttft_s")}
    found = table({"arms": {"int8": {"openai": figures, "bench_multiturn": without}}})
    assert found.rows == [
        ["int8", "openai", "24 of 24", "102.0 / 100.0 (+2.0%)", "10.00 / 10.00", "5,000 / 5,000"],
        ["int8", "bench_multiturn", "24 of 24", "102.0 / 100.0 (+2.0%)", "–", "–"],
    ]
