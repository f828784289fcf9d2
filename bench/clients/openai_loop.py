"""Asks a server through the openai package, one request after the other.

    python -m bench.clients.openai_loop URL FILE REQUESTS

FILE gets the times and the usage as the package hands them out.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI

from bench.clients.shape import GROUPS, OUTPUT_TOKENS
from loadtest.token_times import TokenTimes


def ask(url: str, requests: int) -> dict[str, float]:
    """Medians in seconds, and cached tokens in all."""
    straight = httpx.Client(trust_env=False)
    client = OpenAI(base_url=f"{url}/v1", api_key="none", http_client=straight)
    times: list[TokenTimes] = []
    cached = 0
    for number in range(requests):
        group = number * 5 % GROUPS
        prompt = (
            f"Group {group}. " + "It was a dark and stormy night. " * 30 + f"Question {number}?"
        )
        one = TokenTimes()
        start = time.perf_counter()
        stream: Any = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=OUTPUT_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                one.chunk(one.output_tokens + 1, time.perf_counter() - start)
            if chunk.usage and chunk.usage.prompt_tokens_details:
                cached += chunk.usage.prompt_tokens_details.cached_tokens or 0
        one.end(time.perf_counter() - start)
        times.append(one)
    return {
        "requests": len(times),
        "ttft_s": statistics.median(one.ttft for one in times),
        "tpot_s": statistics.median(one.tpot for one in times if one.tpot is not None),
        "cached_tokens": cached,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(ask(sys.argv[1], int(sys.argv[3]))))
