"""HTTP past the proxies of the environment; what misbehaving servers do is in test_exporter.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from hiqcache import direct_http

REPOSITORY = Path(__file__).parents[1]

#: Nothing listens there: what goes by this proxy fails.
DEAD_PROXY = "http://127.0.0.1:9"


class _Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._answer({"path": self.path})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self._answer({"body": body, "type": self.headers["Content-Type"]})

    def _answer(self, document: dict[str, str]) -> None:
        self.send_response(503 if self.path == "/ill" else 200)
        self.send_header("Content-Type", "application/json; charset=utf-8")
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, format: str, *args: object) -> None:
        """No line per request."""


@pytest.fixture(autouse=True)
def _dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, DEAD_PROXY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Iterator[str]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), _Echo)
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{found.server_port}"
    found.shutdown()
    found.server_close()


def test_no_proxy_comes_between(server: str) -> None:
    answer = direct_http.get(f"{server}/a/b?c=d e".replace(" ", "%20"))
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert answer.json() == {"path": "/a/b?c=d%20e"}
    sent = direct_http.post(server, {"a": [1]}).json()
    assert (json.loads(sent["body"]), sent["type"]) == ({"a": [1]}, "application/json")
    assert direct_http.post(server).json()["body"] == ""


def test_a_child_s_own_requests_keep_to_this_machine() -> None:
    direct = direct_http.past_proxies({"no_proxy": "a.example, b", "NO_PROXY": "b,127.0.0.1"})
    assert direct["no_proxy"] == direct["NO_PROXY"] == "a.example,b,127.0.0.1,localhost,::1"
    assert direct_http.past_proxies({})["no_proxy"] == "127.0.0.1,localhost,::1"
    assert direct_http.past_proxies({"no_proxy": "*"})["no_proxy"] == "*"


def test_what_is_no_success_is_an_error_with_its_status(server: str) -> None:
    with pytest.raises(direct_http.HttpError, match="503 Service Unavailable") as raised:
        direct_http.get(f"{server}/ill")
    assert raised.value.status == 503
    assert direct_http.answers(f"{server}/well")
    assert not direct_http.answers(f"{server}/ill")
    assert not direct_http.answers(DEAD_PROXY)


@pytest.mark.parametrize("asks", ["hiqcache.direct_http", "loadtest.health"])
@pytest.mark.parametrize(("path", "status"), [("well", 0), ("ill", 1)])
def test_a_container_s_health_is_its_own_server_s(
    server: str, asks: str, path: str, status: int
) -> None:
    command = [sys.executable, "-m", asks, f"{server}/{path}"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    assert subprocess.run(command, env=env, stderr=subprocess.DEVNULL).returncode == status


def test_the_servers_health_check_asks_its_port(server: str) -> None:
    command = [sys.executable, "docker/healthcheck.py"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PORT": server.rpartition(":")[2]}
    assert subprocess.run(command, cwd=REPOSITORY, env=env).returncode == 0
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**env, "PORT": "9"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "http://127.0.0.1:9/health" in done.stderr
