"""One streamed completion over the OpenAI-compatible API, with its times and its cache hits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import httpx
from openai import OpenAI


@dataclass(frozen=True)
class Completion:
    """An answer.

    tokens: the answer's tokens, as text, in order.
    logprobs: one log-probability (natural logarithm) a token.
    ttft_ms: milliseconds from sending the request to the first token.
    prompt_tokens: tokens of the prompt; device_tokens, host_tokens and storage_tokens of them were
        found in L1, restored from L2 and read from L3.
    """

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    ttft_ms: float
    prompt_tokens: int
    device_tokens: int
    host_tokens: int
    storage_tokens: int = 0


def client_of(url: str) -> OpenAI:
    """A client of the server at ``url``; it does not retry, so that a failure is seen."""
    # Straight to the server, past the proxies of the environment.
    straight = httpx.Client(trust_env=False)
    return OpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300, http_client=straight
    )


def complete(
    client: OpenAI, prompt: str | list[int], max_tokens: int, model: str = "default"
) -> Completion:
    """Stream a greedy completion of ``prompt`` (text or token ids) by ``model``.

    SGLang serves one model and takes any name for it; a router does not.

    Raises openai.OpenAIError where the server fails, RuntimeError for a stream that ended early.
    """
    start = time.perf_counter()
    stream: Any = client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        logprobs=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"return_cached_tokens_details": True},
    )
    tokens: list[str] = []
    logprobs: list[float] = []
    ttft_ms = 0.0
    details: dict[str, Any] = {}
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        extension = (chunk.model_extra or {}).get("sglext") or {}
        details = extension.get("cached_tokens_details") or details
        for choice in chunk.choices:
            if choice.logprobs is None or not choice.logprobs.tokens:
                continue
            if not tokens:
                ttft_ms = (time.perf_counter() - start) * 1e3
            tokens += choice.logprobs.tokens
            logprobs += choice.logprobs.token_logprobs
    if usage is None or not tokens or len(tokens) != usage.completion_tokens:
        raise RuntimeError(
            f"the stream ended early: {len(tokens)} tokens arrived, the server counts "
            f"{usage.completion_tokens if usage else 'none'}."
        )
    return Completion(
        tuple(tokens),
        tuple(logprobs),
        ttft_ms,
        usage.prompt_tokens,
        int(details.get("device") or 0),
        int(details.get("host") or 0),
        int(details.get("storage") or 0),
    )
