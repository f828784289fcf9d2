"""Do restored prefixes answer as if they had never left the GPU? On real servers, under pressure.

Starts one server an arm and, on each:

capacity  reads tokens and bytes per token of L2 from the running server.
exact     long prompts, one at a time: the answer from a restored prefix against the same request
          while its prefix was still in L1 as computed. The same shapes run, so BF16 must be equal.
pressure  thousands of concurrent requests over a set of short prompts larger than L2. Every answer
          is compared with its own reference. ``bound`` is half of what it takes to be another
          prompt: of the distance between the two closest references, so that a swapped or stale
          prefix cannot stay within it, and of what replacing one token in the middle of a prompt
          changes (the median), so that one torn row is seen more often than not.

Answers are compared by the log-probabilities (natural logarithm) of fixed token ids. SGLang's dummy
weights give every prompt the same answer: use loadtest.random_model's, or trained ones with --text.

With --text prompts are windows of real text. Among thousands of a trained model's answers, rounding
changes some by half of what one token does (results/h200/server_smollm2.json), so an answer is a
mismatch where another prompt's reference is nearer than its own, and ``bound``, up to which it
cannot be, half of the distance between the two closest.
``median_change_restored`` beside ``one_token`` shows rows that were torn throughout.

    python -m loadtest.verify --model DIR --arms bf16,int8,int8:mover --out FILE [-- SGLANG ARGS]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import requests
from numpy.typing import NDArray

from loadtest.quality.texts import TEXTS, tokens_of, windows
from loadtest.servers import CPU_ARGS, CPU_ENV, Server, ServerError, scrape, started

NEW_TOKENS = 4


class Reply(NamedTuple):
    """One answer: log-probabilities [NEW_TOKENS, watched ids], and where its prompt was."""

    values: NDArray[np.float64]
    device: int
    host: int


class Sizes(NamedTuple):
    """How much is asked: prompts and their tokens, and requests."""

    long_prompts: int
    long_tokens: int
    short_prompts: int
    short_tokens: int
    requests: int
    concurrency: int


@dataclass(frozen=True)
class RandomPrompts:
    """Random ids below ``vocabulary``, for weights that tell any two of them apart."""

    vocabulary: int = 256
    #: Token ids whose log-probabilities are compared: bytes, in a vocabulary beginning with them.
    watched: tuple[int, ...] = tuple(range(32, 64))

    def draw(self, count: int, width: int, seed: int) -> list[list[int]]:
        """``count`` prompts of ``width`` tokens."""
        generator = np.random.default_rng(seed)
        return [row.tolist() for row in generator.integers(0, self.vocabulary, (count, width))]

    def other(self, token: int) -> int:
        """A token in place of ``token``."""
        return (token + 1) % self.vocabulary


class TextPrompts:
    """Windows of a text, and as watched ids its 256 most frequent ``tokens``."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = tokens
        self.watched = tuple(token for token, _ in Counter(tokens).most_common(256))

    def draw(self, count: int, width: int, seed: int) -> list[list[int]]:
        """``count`` windows of ``width`` tokens. Raises ValueError where the text is too short."""
        start = int(np.random.default_rng(seed).integers(len(self._tokens)))
        return windows([*self._tokens[start:], *self._tokens[:start]], count, width)

    def other(self, token: int) -> int:
        """A token in place of ``token``."""
        first, second, *_ = self.watched
        return first if token != first else second


Prompts = RandomPrompts | TextPrompts


def ask(
    server: Server, ids: Sequence[int], watched: Sequence[int], tokens: int = NEW_TOKENS
) -> Reply:
    """Generate greedily from the prompt ``ids``. Raises requests.RequestException."""
    response = requests.post(
        f"{server.url}/generate",
        json={
            "input_ids": list(ids),
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            "return_logprob": True,
            "token_ids_logprob": list(watched),
        },
        timeout=300,
    )
    response.raise_for_status()
    meta = response.json()["meta_info"]
    details = meta.get("cached_tokens_details") or {}
    rows = [[entry[0] for entry in step] for step in meta["output_token_ids_logprobs"]]
    return Reply(
        np.array(rows, dtype=np.float64),
        int(details.get("device") or 0),
        int(details.get("host") or 0),
    )


def distance(one: Reply, other: Reply) -> float:
    """Largest change of a watched log-probability at the first generated position.

    Later positions follow from the token that was chosen there, so a near-tie would count as a
    large change; the first depends on the prompt's rows alone.
    """
    return float(np.abs(one.values[0] - other.values[0]).max())


def capacity(server: Server) -> dict[str, Any]:
    """L2 as the running server reports it, for each tensor-parallel rank."""
    text = requests.get(f"{server.url}/metrics", timeout=60).text
    ranks: dict[str, dict[str, float]] = {}
    for line in text.splitlines():
        for name in ("capacity_tokens", "capacity_bytes", "bytes_per_token"):
            if line.startswith(f"hiqcache_l2_{name}{{"):
                rank = line.split('tp_rank="')[1].split('"')[0]
                ranks.setdefault(rank, {})[name] = float(line.rsplit(" ", 1)[1])
    return {
        "host_total_tokens": scrape(server)["sglang:hicache_host_total_tokens"],
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
    for text in chance.sample(texts, min(64, len(texts))):
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


def strays(order: Sequence[int], replies: Sequence[Reply], references: Sequence[Reply]) -> int:
    """How many ``replies`` are nearer to another reference than to theirs, ``order``'s."""
    values = np.stack([reference.values[0] for reference in references])
    nearest = [int(np.abs(values - reply.values[0]).max(axis=1).argmin()) for reply in replies]
    return sum(found != own for found, own in zip(nearest, order, strict=True))


def closest(rows: Sequence[NDArray[np.float64]]) -> float:
    """The smallest distance between any two of ``rows`` (largest element difference)."""
    values = np.stack(rows)
    least = np.inf
    for index in range(len(values) - 1):
        least = min(least, float(np.abs(values[index + 1 :] - values[index]).max(axis=1).min()))
    return least


def check(arm: str, found: dict[str, Any]) -> list[str]:
    """What in an arm's figures must not be."""
    wrong = []
    if not found["exact"]["compared"]:
        wrong.append(f"{arm}: no long prompt was restored")
    if arm == "bf16" and found["exact"]["equal"] != found["exact"]["compared"]:
        wrong.append("bf16: restored answers differ from L1 hits")
    if not found["pressure"]["restored_requests"]:
        wrong.append(f"{arm}: nothing was restored under pressure")
    if not found["pressure"]["bound"] > 0:
        wrong.append(f"{arm}: the weights answer every prompt alike, so the check sees nothing")
    if found["pressure"]["mismatches"]:
        wrong.append(f"{arm}: {found['pressure']['mismatches']} mismatches under pressure")
    return wrong


def made_with() -> dict[str, Any]:
    """Versions, commit and hardware, and the card where there is one."""
    import torch

    from loadtest.experiments import environment

    described = environment.describe()
    card = None
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        card = lines.strip().splitlines()
    return {"versions": described["versions"], "card": card, "environment": described}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--arms", default="bf16,int8,int8-rot")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="serve on the CPU")
    parser.add_argument("--vocabulary", type=int, default=256, help="random ids lie below it")
    parser.add_argument("--text", choices=TEXTS, help="windows of a text instead of random ids")
    parser.add_argument("--long", default="16x2048", help="prompts x tokens of the exact stage")
    parser.add_argument("--short", default="1500x96", help="prompts x tokens under pressure")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a start")
    parser.add_argument("sglang", nargs="*", help="arguments for SGLang, after --")
    arguments = parser.parse_args()
    (long_prompts, long_tokens), (short_prompts, short_tokens) = (
        map(int, text.split("x")) for text in (arguments.long, arguments.short)
    )
    sizes = Sizes(
        *(long_prompts, long_tokens, short_prompts, short_tokens),
        *(arguments.requests, arguments.concurrency),
    )

    prompts: Prompts = RandomPrompts(arguments.vocabulary)
    if arguments.text:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        prompts = TextPrompts(tokens_of(arguments.text, tokenizer))

    result: dict[str, Any] = {
        "command": " ".join(["python -m loadtest.verify", *sys.argv[1:]]),
        **made_with(),
        "arms": {},
    }
    lock = threading.Lock()
    servers: dict[str, Server] = {}
    for arm in arguments.arms.split(","):
        codec, _, transfer = arm.partition(":")
        env = {"HIQCACHE_CODEC": codec, **({"HIQCACHE_TRANSFER": transfer} if transfer else {})}
        servers[arm] = Server(
            arm,
            arguments.model,
            arguments.out.with_suffix("") / f"{arm.replace(':', '-')}.log",
            (*(CPU_ARGS if arguments.cpu else ()), *arguments.sglang),
            {**(CPU_ENV if arguments.cpu else {}), **env},
        )

    def one(arm: str) -> None:
        server = servers[arm]
        stages: dict[str, Callable[[], dict[str, Any]]] = {
            "capacity": lambda: capacity(server),
            "exact": lambda: exact(server, sizes, prompts),
            "pressure": lambda: pressure(server, sizes, prompts),
        }
        with lock:
            found = result["arms"][arm] = {}
        for name, stage in stages.items():
            start = time.monotonic()
            figures = stage()
            with lock:
                found[name] = figures
            print(f"{arm} {name} ({time.monotonic() - start:.0f} s): {found[name]}", flush=True)
            save()

    def save() -> None:
        with lock:
            done = {arm: found for arm, found in result["arms"].items() if "pressure" in found}
            problems = [problem for arm, found in done.items() for problem in check(arm, found)]
            result["problems"] = [*failures, *problems]
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")

    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    with started(*servers.values()):
        try:
            for server in servers.values():
                server.wait(arguments.timeout)
                print(f"{server.name} serves", flush=True)
            with ThreadPoolExecutor(len(servers)) as pool:
                list(pool.map(one, servers))
        except (ServerError, requests.RequestException) as error:
            failures.append(str(error))
            failures += [server.tail(40) for server in servers.values()]
    save()
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
