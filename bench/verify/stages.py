"""What each arm goes through: its capacity, exact restores, restores under pressure."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from bench.lab.server_metrics import CAPACITY, by_labels, page_of, totals
from bench.lab.servers import Server
from bench.verify.answers import Reply, ask, closest, distance, strays
from bench.verify.prompts import Prompts, TextPrompts
from hiqcache import direct_http


class Sizes(NamedTuple):
    """How much is asked: prompts and their tokens, and requests.

    changed: prompts asked again with one token changed, which says how little would be seen.
    """

    long_prompts: int
    long_tokens: int
    short_prompts: int
    short_tokens: int
    requests: int
    concurrency: int
    changed: int = 64


def capacity(server: Server) -> dict[str, Any]:
    """L2 as the running server reports it: for each tensor-parallel rank, each of its pools.

    A pool's transfer is the one that serves it: ``stock`` and ``copy`` (on CPUs) are SGLang's own.
    """
    page = page_of(server)
    arguments = direct_http.get(f"{server.url}/server_info").json()
    sizes = ("capacity_tokens", "capacity_bytes", "bytes_per_token")
    ranks: dict[str, dict[str, dict[str, float | str]]] = {}
    labels = ("tp_rank", "pool", "codec", "transfer")
    for (rank, pool, codec, transfer), values in by_labels(page, labels, "hiqcache_l2_").items():
        figures = {name: values[name] for name in sizes}
        ranks.setdefault(rank, {})[pool] = {"codec": codec, "transfer": transfer, **figures}
    return {
        "host_total_tokens": totals(page)[CAPACITY],
        "page_size": int(arguments["page_size"]),
        "tp_size": int(arguments["tp_size"]),
        "ranks": ranks,
    }


def exact(server: Server, sizes: Sizes, prompts: Prompts) -> dict[str, Any]:
    """Long prompts one at a time: restored answers against L1 hits."""
    texts = prompts.draw(sizes.long_prompts, sizes.long_tokens, seed=1)
    references = []
    for text in texts:
        # Without its last token first: the cache would bring that token's rows too, as the cold
        # prefill computed them, where a restored prefix computes them as one token.
        ask(server, text[:-1], prompts.watched, 1)
        references.append(ask(server, text, prompts.watched))
    restored = [ask(server, text, prompts.watched) for text in texts]
    pairs = [
        (now, then)
        for now, then in zip(restored, references, strict=True)
        if now.host and now.host + now.device == then.device and not then.host
    ]
    changes = [distance(now, then) for now, then in pairs]
    return {
        "prompts": len(texts),
        "prompt_tokens": sizes.long_tokens,
        "compared": len(pairs),
        "host_tokens": sum(now.host for now, _ in pairs),
        "equal": sum(bool(np.array_equal(now.values, then.values)) for now, then in pairs),
        "largest_change": max(changes, default=None),
    }


def pressure(server: Server, sizes: Sizes, prompts: Prompts) -> dict[str, Any]:
    """Concurrent requests over more prompts than L2 holds; every answer against its reference."""
    texts = prompts.draw(sizes.short_prompts, sizes.short_tokens, seed=2)

    def once(text: list[int]) -> Reply:
        return ask(server, text, prompts.watched, 1)

    def first(text: list[int]) -> Reply:
        once(text[:-1])
        return once(text)

    chance = random.Random(3)
    changed = []
    for text in chance.sample(texts, min(sizes.changed, len(texts))):
        other = list(text)
        other[len(other) // 2] = prompts.other(other[len(other) // 2])
        changed.append((text, other))
    with ThreadPoolExecutor(sizes.concurrency) as pool:
        # Under pressure a prompt may leave L1 before its reference is asked: it has none then.
        asked = list(zip(texts, pool.map(first, texts), strict=True))
        kept = [(text, reply) for text, reply in asked if reply.device and not reply.host]
        texts, references = [text for text, _ in kept], [reply for _, reply in kept]
        one_token = [
            distance(a, b)
            for a, b in zip(
                pool.map(once, (text for text, _ in changed)),
                pool.map(once, (other for _, other in changed)),
                strict=True,
            )
        ]
        order = [chance.randrange(len(texts)) for _ in range(sizes.requests)]
        start = time.monotonic()
        replies = list(pool.map(lambda index: once(texts[index]), order))
        seconds = time.monotonic() - start
    apart = closest([reply.values[0] for reply in references])
    changes = np.array(
        [distance(reply, references[i]) for i, reply in zip(order, replies, strict=True)]
    )
    if isinstance(prompts, TextPrompts):
        bound = apart / 2
        mismatches = strays(order, replies, references)
    else:
        bound = min(apart, float(np.median(one_token))) / 2
        mismatches = int((changes > bound).sum())
    from_host = np.array([reply.host > 0 for reply in replies])
    return {
        "requests": len(replies),
        "prompts": len(texts),
        "prompt_tokens": sizes.short_tokens,
        "seconds": seconds,
        "restored_requests": int(from_host.sum()),
        "host_tokens": sum(reply.host for reply in replies),
        "device_tokens": sum(reply.device for reply in replies),
        "bound": bound,
        "closest_two_prompts": apart,
        "mismatches": mismatches,
        "median_change_restored": float(np.median(changes[from_host])) if any(from_host) else None,
        "largest_change_restored": float(changes[from_host].max(initial=0)),
        "largest_change_others": float(changes[~from_host].max(initial=0)),
        "one_token": {
            "median_change": float(np.median(one_token)),
            "seen_share": float(np.mean(np.array(one_token) > bound)),
        },
    }
