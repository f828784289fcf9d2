"""HTTP to the servers of one's own stack: straight to them, past any proxy of the environment.

A proxy variable (http_proxy) is meant for the world outside; a proxy cannot reach this machine's
loopback or a container's name. `http.client` knows no such variables. Besides, whatever a server
does, a request ends: within its timeout as a whole, and with no more bytes than its limit.

`python -m hiqcache.direct_http URL` ends with status 0 where URL answers: containers' health.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

#: Bytes of an answer. SGLang's /metrics takes under 1 MB; whole distributions over a vocabulary, as
#: the quality harness asks for, take tens.
LIMIT = 256 * 2**20


class HttpError(OSError):
    """No answer, no whole answer, or an answer that is no success; the text says which.

    status: of an answer that came, else None.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Answer:
    """A whole answer with a status of 200 to 299."""

    status: int
    content_type: str
    body: bytes

    @property
    def text(self) -> str:
        """The body, which must be UTF-8. Raises ValueError."""
        return self.body.decode()

    def json(self) -> Any:
        """The body, which must be JSON. Raises ValueError."""
        return json.loads(self.body)


def checked(url: str) -> str:
    """``url``, if it is an http or https one with a host. Raises ValueError that says what is not.

    No answer of a server tells a wrong address from a server that is down, so check early.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no address: give one such as http://127.0.0.1:30000.")
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"{url!r}: {error}.") from error
    if not url.isascii() or any(character <= " " for character in url):
        raise ValueError(f"{url!r} holds characters that no address has: write them as %XX.")
    return url


def get(
    url: str,
    *,
    timeout: float = 60,
    limit: int = LIMIT,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """What ``url`` answers. ``timeout`` in seconds, for the whole; ``limit`` in bytes.

    Raises HttpError, and ValueError for an address that is none.
    """
    return _ask("GET", url, None, timeout, limit, headers or {})


def post(
    url: str,
    document: Any = None,
    *,
    timeout: float = 600,
    limit: int = LIMIT,
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """What ``url`` answers to ``document``, sent as JSON (None: nothing). As ``get``."""
    body = b"" if document is None else json.dumps(document).encode()
    given = {"Content-Type": "application/json", **(headers or {})}
    return _ask("POST", url, body, timeout, limit, given)


def answers(url: str, *, timeout: float = 60) -> bool:
    """Whether ``url`` answers with a success: for waiting until a server serves."""
    with contextlib.suppress(HttpError):
        get(url, timeout=timeout)
        return True
    return False


def past_proxies(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that keep a program's requests to this machine away from the proxies of ``env``.

    For programs whose client is not ours. What ``env`` excepts already stays excepted.
    """
    given = [env.get(name, "") for name in ("no_proxy", "NO_PROXY")]
    hosts = [host.strip() for text in given for host in text.split(",")]
    value = ",".join(dict.fromkeys([*filter(None, hosts), "127.0.0.1", "localhost", "::1"]))
    if "*" in hosts:
        value = "*"  # excepts all, and means nothing among others
    # Some programs read the one, some the other.
    return {"no_proxy": value, "NO_PROXY": value}


def _ask(
    method: str,
    url: str,
    body: bytes | None,
    timeout: float,
    limit: int,
    headers: Mapping[str, str],
) -> Answer:
    parts = urlsplit(checked(url))
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    assert parts.hostname is not None
    connection = kind(parts.hostname, parts.port, timeout=timeout)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    late = threading.Event()
    timer: threading.Timer | None = None
    try:
        connection.connect()
        # A socket's own timeout starts again with every byte that comes.
        timer = threading.Timer(timeout, _cut, (connection.sock, late))
        timer.daemon = True
        timer.start()
        connection.request(method, target, body, {"Connection": "close", **headers})
        answer = connection.getresponse()
        content = answer.read(limit + 1)
        # read(n) returns what there is where a connection breaks off.
        broken = answer.length not in (None, 0) and len(content) <= limit
    except (OSError, HTTPException) as error:
        reason = f"no whole answer within {timeout:g} s" if late.is_set() else _said(error)
        raise HttpError(f"{method} {url}: {reason}") from error
    finally:
        if timer is not None:
            timer.cancel()
        connection.close()
    if late.is_set() or broken:
        reason = f"no whole answer within {timeout:g} s" if late.is_set() else "it broke off"
        raise HttpError(f"{method} {url}: {reason}", answer.status)
    if len(content) > limit:
        raise HttpError(f"{method} {url}: more than {limit:,} bytes", answer.status)
    if not 200 <= answer.status < 300:
        start = content[:500].decode(errors="replace").strip()
        raise HttpError(
            f"{method} {url}: status {answer.status} {answer.reason}: {start}", answer.status
        )
    return Answer(answer.status, answer.headers.get_content_type(), content)


def _cut(connected: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def main(url: str) -> int:
    """Exit status 0 where ``url`` answers; else 1, and why."""
    try:
        # Docker's own limits are shorter or longer; SGLang's /health gives up after 20 s.
        get(url, timeout=25)
    except (HttpError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
