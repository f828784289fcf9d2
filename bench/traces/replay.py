"""Replays a trace on real servers, at a scale that fits, beside the exact simulation.

    python -m bench.traces replay TRACE.jsonl [--model DIR] [--cpu] ...

A trace is Mooncake's JSONL. Its first ``--requests`` requests are sent to each arm one after the
other, so that the simulation (two_tiers.py) must predict every hit; times of arrival are not kept.
Each 512-token block becomes ``--block-tokens`` tokens and prompts are cut at
``--max-input-tokens``; answers are one token long. All arms' servers are up at once, and take
turns by stretches of requests, so that a machine that speeds up or slows down meets all alike.

Writes DIR/<trace>-replay.json, and DIR's report anew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from bench import REPOSITORY
from bench.lab import environment, shards
from bench.lab.arms import Arm, arms_named
from bench.lab.bootstrap import bootstrap, bootstrap_pairs
from bench.lab.client import BenchError, Client, Timing
from bench.lab.models import prepare
from bench.lab.servers import ServerError, serving
from bench.tiers.checks import reasons_invalid
from bench.tiers.measure import Bench, turns
from bench.tiers.plan import CPU, GPU, Experiment, Point
from bench.tiers.settle import settled, warm_up
from bench.traces.two_tiers import PAGE_SPARE, RESTORE_AT_LEAST, Hit, TwoTierCache, pages_of
from hiqcache.geometry import KVGeometry
from hiqcache.model import read_model
from loadtest.workloads.mooncake import BLOCK_TOKENS, Trace

#: Requests of a stretch.
STRETCH = 20

#: By machine: tokens a block, of the longest prompt, of L1 and of BF16's L2.
DEFAULTS = {"cpu": (8, 1024, 2304, 36_864), "gpu": (512, 16_384, 20_480, 327_680)}


def prompts(trace: Trace, requests: int, block_tokens: int, longest: int) -> list[list[int]]:
    """The first ``requests`` prompts, a block cut to its first ``block_tokens`` tokens."""
    found = []
    for line in trace.lines[:requests]:
        length = min(-(-line.input_length * block_tokens // BLOCK_TOKENS), longest)
        blocks = line.hash_ids[: -(-length // block_tokens)]
        tokens = [token for block in blocks for token in trace.block(block)[:block_tokens]]
        found.append(tokens[:length])
    return found


def mean(sample: NDArray[np.float64]) -> float:
    """Of milliseconds."""
    return float(sample.mean())


def simulate(
    asked: Sequence[Sequence[int]], l1_tokens: int, l2_tokens: int, page_size: int = 1
) -> list[Hit]:
    """What each prompt hits in both tiers, in tokens."""
    cache = TwoTierCache(
        l1_tokens // page_size,
        l2_tokens // page_size,
        -(-RESTORE_AT_LEAST // page_size),
        spare=PAGE_SPARE if page_size > 1 else 0,
    )
    hits = (
        cache.request(pages_of(prompt, page_size), scratch=1 if len(prompt) % page_size else 0)
        for prompt in asked
    )
    return [Hit(*(page_size * units for units in hit)) for hit in hits]


#: Timings of all prompts, and the server's metrics before and after.
Measured = tuple[list[Timing], dict[str, float], dict[str, float]]


async def replay(
    urls: dict[str, str], asked: Sequence[Sequence[int]], warming: Point
) -> dict[str, Measured]:
    """Timings of every prompt on every arm, with the servers' metrics before and after."""
    timings: dict[str, list[Timing]] = {name: [] for name in urls}
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(Client(url)) for name, url in urls.items()}
        for client in clients.values():
            await warm_up(client, warming)
            await client.flush()
        before = {name: await client.metrics() for name, client in clients.items()}
        with tqdm(total=len(asked) * len(urls), unit="request") as bar:
            for name, stretch in turns(list(clients), asked, STRETCH):
                for prompt in stretch:
                    timings[name].append(await clients[name].generate(prompt, 1))
                    bar.update()
        after = {name: await settled(client) for name, client in clients.items()}
    return {name: (timings[name], before[name], after[name]) for name in urls}


def summary_of(
    arm: Arm,
    plan: Experiment,
    geometry: KVGeometry,
    asked: Sequence[Sequence[int]],
    measured: Measured,
    control: list[Timing],
) -> dict[str, Any]:
    """One arm's row."""
    timings, before, after = measured
    tokens = sum(timing.prompt for timing in timings)
    device, host = (sum(getattr(t, tier) for t in timings) for tier in ("device", "host"))
    l2_tokens = plan.capacity(arm, geometry)
    expected = simulate(asked, plan.l1_of(arm), l2_tokens, plan.scale.page_size)
    equal = sum((t.device, t.host) == hit for t, hit in zip(timings, expected, strict=True))
    ttft, controls = (
        np.array([1000 * timing.ttft for timing in each]) for each in (timings, control)
    )
    return {
        "arm": arm.name,
        "l1_tokens": plan.l1_of(arm),
        "l2_tokens": l2_tokens,
        "bytes_per_token": plan.bytes_per_token(arm, geometry),
        "prompt_tokens": tokens,
        "device": device / tokens,
        "host": host / tokens,
        "hit_ratio": (device + host) / tokens,
        "simulated_hit_ratio": sum(hit.device + hit.host for hit in expected) / tokens,
        "requests_as_simulated": equal,
        "ttft_ms": bootstrap([ttft], mean).as_dict(),
        "ttft_ratio": bootstrap_pairs(
            [(ttft, controls)], lambda ours, theirs: mean(ours) / mean(theirs)
        ).as_dict(),
        "invalid": reasons_invalid(plan, arm, geometry, timings, before, after),
    }


def _warming(l1_tokens: int) -> Point:
    """Prompts that leave L1 twice over."""
    prefix = max(16, l1_tokens // 6)
    return Point("warm-up", 12, prefix, 16, 1, 1, 1, True, 1)


def _command(options: argparse.Namespace, arguments: Sequence[str]) -> str:
    """The command, folders by their last name."""
    folders = {str(path): path.name for path in (options.trace, options.model, options.out) if path}
    named = [folders.get(str(Path(argument)), argument) for argument in arguments]
    return shlex.join(["python", "-m", "bench.traces", "replay", *named])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``run`` reads to ``parser``."""
    parser.add_argument("trace", type=Path)
    parser.add_argument("--model", type=Path, help="a local model folder; SmolLM2 on a CPU")
    parser.add_argument("--arms", default="bf16,int8", help="the first is the control")
    parser.add_argument("--cpu", action="store_true", help="SGLang on the CPU")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--block-tokens", type=int, help="tokens that stand for a block of 512")
    parser.add_argument("--max-input-tokens", type=int, help="after that")
    shards.add_arguments(parser)
    parser.add_argument("--l1-tokens", type=int)
    parser.add_argument("--l2-tokens", type=int, help="BF16's; others have the same bytes")
    parser.add_argument("--server-args", default="", help="further SGLang arguments, quoted")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "results" / "traces")


def run(options: argparse.Namespace) -> int:
    """Replay a trace on every arm, and write what came of it; the exit status."""
    try:
        return _run(options)
    except (BenchError, ServerError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    cpu = options.cpu or not torch.cuda.is_available()
    if options.model is None and not cpu:
        options.parser.error("--model DIR names the model to serve")
    defaults = DEFAULTS["cpu" if cpu else "gpu"]
    given = (options.block_tokens, options.max_input_tokens, options.l1_tokens, options.l2_tokens)
    block, longest, l1_tokens, l2_tokens = (
        default if value is None else value for value, default in zip(given, defaults, strict=True)
    )
    if not 1 <= block <= BLOCK_TOKENS or not 1 <= longest < l1_tokens < l2_tokens:
        options.parser.error(
            f"--block-tokens is from 1 to {BLOCK_TOKENS}; L1 must be larger than a prompt, and L2 "
            "larger than L1"
        )
    model = options.model or prepare()
    cut = shards.chosen(options, cpu)
    geometry = read_model(model, cut.tp_size).geometry
    arms = tuple(arms_named(options.arms))
    if l1_tokens % cut.page_size:
        options.parser.error(f"L1 of {l1_tokens} tokens must be whole pages of {cut.page_size}")
    scale = replace(
        CPU if cpu else GPU,
        shards=cut,
        l1_tokens=l1_tokens,
        l2_gigabytes=None,
        l2_ratio=l2_tokens / l1_tokens,
    )
    plan = Experiment("replay", arms, l1_tokens, False, (), scale)
    asked = prompts(Trace(options.trace), options.requests, block, longest)
    server_args = shards.further_arguments(options.server_args)
    bench = Bench(model, geometry, scale, cpu, server_args, REPOSITORY / ".cache" / "bench")
    servers = [bench.server(plan, arm) for arm in arms]
    with serving(*servers, timeout=600):
        urls = {server.name: server.url for server in servers}
        measured = asyncio.run(replay(urls, asked, _warming(l1_tokens)))
    control = measured[arms[0].name][0]
    rows = [summary_of(arm, plan, geometry, asked, measured[arm.name], control) for arm in arms]
    result = {
        "replayed": options.trace.stem,
        "requests": len(asked),
        "block_tokens": block,
        "max_input_tokens": longest,
        "l1_tokens": l1_tokens,
        "setup": {
            "model": model.name,
            "dummy_weights": "dummy" in server_args,
            **cut._asdict(),
            "command": _command(options, sys.argv[2:]),
            "environment": environment.describe(),
        },
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"{options.trace.stem}-replay.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['arm']}: L2 {row['l2_tokens']:,} tokens, hit ratio {row['hit_ratio']:.1%}, "
            f"simulated {row['simulated_hit_ratio']:.1%}, {row['requests_as_simulated']} of "
            f"{len(asked)} requests as simulated, mean TTFT {row['ttft_ms']['value']:.0f} ms"
        )
        for reason in row["invalid"]:
            print(f"INVALID: {row['arm']}: {reason}", file=sys.stderr)
    print(f"written: {file}")
    return 1 if any(row["invalid"] for row in rows) else 0
