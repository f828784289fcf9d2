"""What restores take in a running server, by SGLang's own metrics."""

from __future__ import annotations

import statistics
from typing import Any

from bench.lab.server_metrics import RESTORED_BYTES, RESTORED_TOKENS, scrape
from bench.lab.servers import Server
from bench.models.families import Timed
from bench.verify.answers import ask
from bench.verify.prompts import Prompts

_SECONDS = "sglang:load_back_duration_seconds"
#: Times that every prompt is restored; the first is not counted.
ROUNDS = 3


def restores(server: Server, timed: Timed, prompts: Prompts) -> dict[str, Any]:
    """Restores of prompts one at a time, nothing beside them.

    ms: from the first layer's start to the last one's end on the GPU, SGLang's measure, the median
    over requests that restored in one go; None where SGLang measures none (CPUs).
    """
    texts = prompts.draw(timed.prompts, timed.tokens, seed=4)
    for text in texts:
        ask(server, text, prompts.watched, 1)
    found: list[tuple[float, float, float]] = []
    after = scrape(server)
    for index in range(ROUNDS):
        for text in texts:
            before = after
            ask(server, text, prompts.watched, 1)
            after = scrape(server)
            names = f"{_SECONDS}_count", f"{_SECONDS}_sum", RESTORED_TOKENS, RESTORED_BYTES
            times, *rest = (after.get(name, 0) - before.get(name, 0) for name in names)
            if index and times == 1:
                found.append((rest[0] * 1e3, rest[1], rest[2]))
    ms, tokens, size = (list(column) for column in zip(*found, strict=True)) if found else ([],) * 3
    return {
        "prompt_tokens": timed.tokens,
        "restores": len(found),
        "ms": statistics.median(ms) if ms else None,
        "ms_least": min(ms, default=None),
        # Of all pools together.
        "tokens": statistics.median(tokens) if tokens else None,
        "bytes": statistics.median(size) if size else None,
    }
