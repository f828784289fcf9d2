"""Replays traces through both tiers, at any capacity: hit ratio against bytes of L2, each codec.

    python -m bench.traces simulate TRACE.jsonl ... [--model DIR|config.json] [--out DIR]

A trace is Mooncake's JSONL: hash_ids of 512-token blocks. The server that is simulated has
page size 512, so a prompt's last, partial block is computed every time, and L1 holds
``--l1-tokens``. Requests are served one after the other; outputs take no room. Capacities are whole
pages of each codec's record.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import REPOSITORY
from bench.lab import environment
from bench.lab.arms import arm_named
from bench.lab.shapes import QWEN3_8B
from bench.traces.two_tiers import PAGE_SPARE, TwoTierCache
from hiqcache.geometry import KVGeometry
from hiqcache.model import read_model
from loadtest.workloads.mooncake import BLOCK_TOKENS, Line, Trace

#: The arms that differ in bytes per token; int8-rot takes int8's.
CODECS = ("bf16", "int8:mover", "int8")

#: L2 sizes in bytes, in steps of a fifth of a decade: from L1's own, below which SGLang refuses
#: an L2, to where the traces end.
SIZES = tuple(
    round(base * 10**power)
    for power in range(10, 14)
    for base in (1, 1.6, 2.5, 4, 6.3)
    if 6e10 < base * 10**power < 2e13
)

#: L1: what an 80 GB card has left for KV beside Qwen3-8B's weights, about 60 GB.
L1_TOKENS = 400_000


def hit_ratio(lines: Iterable[Line], l1_tokens: int, l2_tokens: int) -> dict[str, float]:
    """Replay ``lines``; shares of all prompt tokens that came from L1 and from L2.

    Raises ValueError for a prompt that L1 cannot hold.
    """
    cache = TwoTierCache(l1_tokens // BLOCK_TOKENS, l2_tokens // BLOCK_TOKENS, spare=PAGE_SPARE)
    prompt = device = host = 0
    for line in lines:
        whole, partial = divmod(line.input_length, BLOCK_TOKENS)
        hit = cache.request(line.hash_ids[:whole], scratch=1 if partial else 0)
        prompt += line.input_length
        device += hit.device * BLOCK_TOKENS
        host += hit.host * BLOCK_TOKENS
    return {
        "device": device / prompt,
        "host": host / prompt,
        "hit_ratio": (device + host) / prompt,
    }


def curve(
    lines: Sequence[Line], geometry: KVGeometry, l1_tokens: int, sizes: Sequence[int] = SIZES
) -> list[dict[str, Any]]:
    """A row for each size in bytes and each codec."""
    tasks = [(size, name) for size in sizes for name in CODECS]
    rows = []
    for size, name in tqdm(tasks, unit="replay"):
        bytes_per_token = arm_named(name).bytes_per_token(geometry, BLOCK_TOKENS)
        tokens = size // (bytes_per_token * BLOCK_TOKENS) * BLOCK_TOKENS
        rows.append(
            {
                "l2_bytes": size,
                "codec": name,
                "bytes_per_token": bytes_per_token,
                "l2_tokens": tokens,
                **hit_ratio(lines, l1_tokens, tokens),
            }
        )
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``run`` reads to ``parser``."""
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--model", type=Path, help="default: Qwen3-8B's shape")
    parser.add_argument("--l1-tokens", type=int, default=L1_TOKENS)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "results" / "traces")


def run(options: argparse.Namespace) -> int:
    """Simulate every trace, a JSON file each; the exit status."""
    geometry = read_model(options.model).geometry if options.model else QWEN3_8B
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.traces:
        lines = Trace(path).lines
        longest = max(line.input_length for line in lines)
        if longest > options.l1_tokens:
            options.parser.error(f"{path} has a prompt of {longest} tokens: raise --l1-tokens")
        everything = sum(line.input_length for line in lines)
        result = {
            "trace": path.stem,
            "requests": len(lines),
            "prompt_tokens": everything,
            "distinct_tokens": BLOCK_TOKENS * len({h for line in lines for h in line.hash_ids}),
            "page_size": BLOCK_TOKENS,
            "l1_tokens": options.l1_tokens,
            "model": options.model.name if options.model else "Qwen3-8B",
            "unbounded": hit_ratio(lines, options.l1_tokens, everything + BLOCK_TOKENS),
            "command": shlex.join(
                [
                    *("python", "-m", "bench.traces", "simulate", path.name),
                    *("--l1-tokens", str(options.l1_tokens)),
                ]
            ),
            "environment": environment.describe(),
            "rows": curve(lines, geometry, options.l1_tokens),
        }
        (options.out / f"{path.stem}.json").write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {options.out / path.stem}.json")
    return 0
