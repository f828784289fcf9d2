"""A measurement's clients reach their servers on loopback, whatever proxy the environment names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from bench.lab.client import Client
from bench.lab.completions import client_of
from bench.lab.server_metrics import scrape

#: Nothing listens there: what goes by this proxy fails.
DEAD_PROXY = "http://127.0.0.1:9"


class _Server(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        models = b'{"object": "list", "data": []}'
        body = models if self.path == "/v1/models" else b"sglang:requests_total 3.0\n"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, DEAD_PROXY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_metrics(url: str) -> None:
    server: Any = SimpleNamespace(url=url)
    assert scrape(server) == {"sglang:requests_total": 3.0}


def test_the_benchs_client(url: str) -> None:
    async def asked() -> dict[str, float]:
        async with Client(url) as client:
            return await client.metrics()

    assert asyncio.run(asked()) == {"sglang:requests_total": 3.0}


def test_the_demos_client(url: str) -> None:
    assert list(client_of(url).models.list()) == []
