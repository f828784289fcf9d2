"""Do restored prefixes answer as if they had never left the GPU? On real servers, under pressure.

Starts one server an arm and, on each:

capacity  reads L2's tokens, bytes per token, codec and transfer from the running server: they must
          be what the arm's layout and name give, on every rank.
exact     long prompts, one at a time: the answer from a restored prefix against the same request
          while its prefix was still in L1 as computed. The same shapes run, so what is stored as it
          is must be equal, and what is quantised must not be.
pressure  thousands of concurrent requests over a set of short prompts larger than L2. Every answer
          is compared with its own reference. ``bound`` is half of what it takes to be another
          prompt: of the distance between the two closest references, so that a swapped or stale
          prefix cannot stay within it, and of what replacing one token in the middle of a prompt
          changes (the median), so that one torn row is seen more often than not.

Answers are compared by the log-probabilities (natural logarithm) of fixed token ids. SGLang's dummy
weights give every prompt the same answer: use bench.lab.random_model's, or trained ones (--text).

With --text prompts are windows of real text. Among thousands of a trained model's answers, rounding
changes some by half of what one token does (results/h200/server_smollm2.json), so an answer is a
mismatch where another prompt's reference is nearer than its own, and ``bound``, up to which it
cannot be, half of the distance between the two closest.
``median_change_restored`` beside ``one_token`` shows rows that were torn throughout.

    python -m bench.verify --model DIR --arms bf16,int8:dma,int8:fused --out FILE [-- SGLANG ARGS]
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.lab import environment, shards
from bench.lab.arms import NAMES, arms_argument
from bench.lab.servers import CPU_ARGS, CPU_ENV, GPU_ARGS, Server, ServerError, started
from bench.lab.texts import TEXTS, tokens_of
from bench.verify.prompts import Prompts, RandomPrompts, TextPrompts
from bench.verify.stages import Sizes, capacity, exact, pressure
from bench.verify.verdict import problems
from hiqcache.direct_http import HttpError
from hiqcache.model import read_model


def made_with() -> dict[str, Any]:
    """Versions, commit and hardware, and the card where there is one."""
    described = environment.describe()
    card = None
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        card = lines.strip().splitlines()
    return {"versions": described["versions"], "card": card, "environment": described}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--arms", type=arms_argument, default="bf16,int8,int8-rot", help=NAMES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu", action="store_true", help="serve on the CPU")
    shards.add_arguments(parser)
    parser.add_argument("--vocabulary", type=int, default=256, help="random ids lie below it")
    parser.add_argument("--text", choices=TEXTS, help="windows of a text instead of random ids")
    parser.add_argument("--long", default="16x2048", help="prompts x tokens of the exact stage")
    parser.add_argument("--short", default="1500x160", help="prompts x tokens under pressure")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--timeout", type=float, default=400, help="seconds for a start")
    parser.add_argument("sglang", nargs="*", help="arguments for SGLang, after --")
    arguments = parser.parse_args()
    try:
        further = shards.further_arguments(arguments.sglang)
        pools = read_model(arguments.model, arguments.tp_size).pools
    except ValueError as error:
        parser.error(str(error))
    cut = shards.chosen(arguments, arguments.cpu)
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
        "command": shlex.join(["python", "-m", "bench.verify", *sys.argv[1:]]),
        **made_with(),
        **cut._asdict(),
        "arms": {},
    }
    lock = threading.Lock()
    servers: dict[str, Server] = {}
    for arm in arguments.arms:
        servers[arm.name] = Server(
            arm.name,
            arguments.model,
            arguments.out.with_suffix("") / f"{arm.file_name}.log",
            (*(CPU_ARGS if arguments.cpu else GPU_ARGS), *cut.args, *arm.args, *further),
            {**(CPU_ENV if arguments.cpu else {}), **arm.env},
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
            # An arm that is not over is one: a file of a run that was ended shows it.
            result["problems"] = [
                *failures,
                *(
                    problem
                    for arm in arguments.arms
                    for found in [result["arms"].get(arm.name, {})]
                    for problem in problems(arm, found, sizes, pools, cut)
                ),
            ]
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
        except (ServerError, HttpError) as error:
            failures.append(str(error))
            failures += [server.tail(40) for server in servers.values()]
    save()
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}", file=sys.stderr)
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
