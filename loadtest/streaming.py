"""Sends one request to an OpenAI-compatible endpoint and times its stream at the token.

A client that times the response's headers, or reads the stream whole, sees a first token that has
little to do with the model's. Here every chunk is stamped when it comes off the socket, and SGLang
is asked to count the tokens in every chunk (``continuous_usage_stats``), so that a chunk that holds
several tokens is counted as several.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import requests
import urllib3

from loadtest.token_times import TokenTimes
from loadtest.workloads.base import ANY_MODEL, Request

Outcome = Literal["ok", "error", "timeout", "truncated"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "error", "timeout", "truncated")

#: A server that is up accepts a connection at once, however long its queue is.
CONNECT_TIMEOUT_S = 10.0


@dataclass
class Sample(TokenTimes):
    """What became of one request, and when its tokens came.

    outcome: ``ok`` where the stream came to its end; ``error`` for a refused connection, an HTTP
        status other than 200, an error inside the stream or an aborted request; ``timeout`` where
        it took too long; ``truncated`` where it broke off before its end was announced. Times mean
        something only where it is ok.
    cached_device, cached_host: prompt tokens that came from L1 and from L2.
    """

    workload: str
    arm: str
    outcome: Outcome
    detail: str = ""
    prompt_tokens: int = 0
    cached_device: int = 0
    cached_host: int = 0
    text: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for Locust's own messages; the text stays behind."""
        return {**asdict(self), "text": ""}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """The inverse of to_dict."""
        return cls(**data)


class _StreamFailedError(Exception):
    """The server reported an error where the stream should have gone on."""


def direct_session() -> requests.Session:
    """A session that goes straight to its servers: no proxy of the environment comes between."""
    session = requests.Session()
    session.trust_env = False
    return session


def send(
    session: requests.Session,
    url: str,
    arm: str,
    workload: str,
    request: Request,
    timeout: float,
    model: str = ANY_MODEL,
) -> Sample:
    """Send ``request`` for ``model`` to the server at ``url`` and read its stream to the end.

    ``timeout`` (seconds) bounds both the silence between two chunks and the whole. Never raises for
    what a server or a network does: that is the sample's outcome.
    """
    sample = Sample(workload, arm, "truncated")
    start = time.perf_counter()
    try:
        with session.post(
            f"{url}{request.path}",
            json=request.body(model),
            stream=True,
            timeout=(min(CONNECT_TIMEOUT_S, timeout), timeout),
        ) as response:
            if response.status_code != 200:
                sample.outcome = "error"
                sample.detail = f"HTTP {response.status_code}: {response.text[:200]}"
                return sample
            _read(sample, response, start, timeout, request.max_tokens)
    # urllib3's own read timeout passes through requests unwrapped while a body is streamed.
    except (requests.Timeout, urllib3.exceptions.ReadTimeoutError, TimeoutError) as error:
        sample.outcome, sample.detail = "timeout", f"{type(error).__name__} after {timeout:g} s"
    except (_StreamFailedError, ValueError) as error:
        sample.outcome, sample.detail = "error", str(error)[:200]
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        # requests reports a socket's time-out amid a body as a ConnectionError.
        if isinstance(error.__context__, urllib3.exceptions.ReadTimeoutError):
            sample.outcome, sample.detail = "timeout", f"silent for {timeout:g} s"
        else:
            sample.outcome = "truncated" if sample.output_tokens else "error"
            sample.detail = f"{type(error).__name__}: {error}"[:200]
    return sample


def _read(
    sample: Sample, response: requests.Response, start: float, timeout: float, most: int
) -> None:
    """Fill ``sample`` from the stream. Raises what requests raises, and _StreamFailedError."""
    finished = False
    texts: list[str] = []
    for moment, payload in _events(response):
        now = moment - start
        if now > timeout:
            raise TimeoutError
        if payload == "[DONE]":
            if finished:
                sample.outcome, sample.text = "ok", "".join(texts)
                sample.end(now)
            else:
                sample.detail = "[DONE] without a finish reason"
            return
        try:
            finished = _take(sample, json.loads(payload), now, most, texts) or finished
            if sample.output_tokens > most:
                raise _StreamFailedError(f"more tokens than the {most} that were asked for")
        # json gives up on a thousand brackets by a RecursionError.
        except (TypeError, AttributeError, RecursionError) as error:
            raise _StreamFailedError(f"this is no chunk of a completion: {payload}") from error
    sample.detail = "the stream ended without [DONE]"


def _take(sample: Sample, event: Any, now: float, most: int, texts: list[str]) -> bool:
    """Take an event into ``sample`` and ``texts``; whether it ends the answer.

    What a server leaves out or gives as null stays as it was. Raises _StreamFailedError, and
    TypeError or AttributeError for an event of another shape.
    """
    if event.get("error") is not None:
        raise _StreamFailedError(str(event["error"]))
    usage = event.get("usage") or {}
    cached = (event.get("sglext") or {}).get("cached_tokens_details") or {}
    for name, given in (
        ("prompt_tokens", usage.get("prompt_tokens")),
        ("cached_device", cached.get("device")),
        ("cached_host", cached.get("host")),
    ):
        if given is not None:
            setattr(sample, name, _count(given))
    if (tokens := usage.get("completion_tokens")) is not None:
        # One too many is enough to be refused; a nonsensical count must not become as many gaps.
        sample.chunk(min(_count(tokens), most + 1), now)
    finished = False
    for choice in event.get("choices") or ():
        texts.append(_text(choice.get("text") or (choice.get("delta") or {}).get("content") or ""))
        if choice.get("finish_reason") == "abort":
            raise _StreamFailedError("the server aborted the request")
        finished = finished or choice.get("finish_reason") is not None
    return finished


def _count(given: object) -> int:
    if not isinstance(given, int) or given < 0:
        raise TypeError(f"a count of tokens is {given!r}")
    return given


def _text(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError(f"a text is {given!r}")
    return given


def _events(response: requests.Response) -> Iterator[tuple[float, str]]:
    """The stream's server-sent events, each with the moment its last byte arrived.

    With ``chunk_size=None`` every HTTP chunk is handed over when it arrives; nothing waits for a
    buffer to fill.
    """
    pending = b""
    for chunk in response.iter_content(chunk_size=None):
        now = time.perf_counter()
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield now, line[len(b"data:") :].strip().decode()
