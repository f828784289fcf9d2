"""Clients that leave before their answer has come."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from hiqcache import direct_http


def hang_up(url: str, ids: Sequence[int], tokens: int = 256, events: int = 1) -> bool:
    """Ask for ``tokens`` tokens after ``ids``, and close the connection after ``events`` of them.

    Whether it was closed in the middle of the stream. Raises OSError where the server fails.
    """
    return _stream(url, ids, tokens, events, "")


def abort(url: str, ids: Sequence[int], tokens: int = 256) -> bool:
    """Ask as ``hang_up`` does, and have the server abort the request once it streams."""
    return _stream(url, ids, tokens, 1, uuid.uuid4().hex)


def _stream(url: str, ids: Sequence[int], tokens: int, events: int, rid: str) -> bool:
    parts = urlsplit(url)
    assert parts.hostname is not None
    body = {
        "input_ids": list(ids),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
        **({"rid": rid} if rid else {}),
    }
    connection = HTTPConnection(parts.hostname, parts.port, timeout=120)
    try:
        connection.request(
            "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"{url}/generate: HTTP {response.status}: {response.read(2000)!r}")
        seen = 0
        while seen < events:
            line = response.readline()
            if not line or line.startswith(b"data: [DONE]"):
                return False
            seen += line.startswith(b"data: ")
        if rid:
            direct_http.post(f"{url}/abort_request", {"rid": rid}, timeout=60)
            # The server ends the stream itself.
            return b"[DONE]" in response.read()
        return True
    except HTTPException as error:
        raise OSError(f"{url}/generate: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
