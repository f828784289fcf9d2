"""Serves a process's own metrics: /metrics for Prometheus, /healthz for what runs it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

#: What /healthz says beside that the process works.
Health = Callable[[], dict[str, Any]]


class _QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """No line per scrape."""


def application(registry: CollectorRegistry, health: Health) -> Callable[..., Iterable[bytes]]:
    """A WSGI application: /metrics, /healthz."""
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            page: Iterable[bytes] = metrics(environ, start_response)
            return page
        if path == "/healthz":
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps({"status": "ok", **health()}).encode() + b"\n"]
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"/metrics and /healthz are here\n"]

    return answer


@contextlib.contextmanager
def serving(host: str, port: int, registry: CollectorRegistry, health: Health) -> Iterator[int]:
    """Serve in the background until left; the port (the one found free where ``port`` is 0).

    Raises ValueError where nothing can listen there.
    """
    try:
        server = make_server(
            host, port, application(registry, health), ThreadingWSGIServer, _QuietHandler
        )
    except OSError as error:
        raise ValueError(
            f"cannot serve on {host}:{port}: {error}. Choose another --port."
        ) from error
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
