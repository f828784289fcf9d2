"""Checks the Locust file's clock against SGLang's own bench_serving, on the same server.

Both send requests of the same kind to the same endpoint at the same time, so that a machine that
speeds up or slows down meets both alike: taking turns, the same client's medians differed by 1.5x
within minutes on a shared one. Requests come by Poisson processes, since two clients that each wait
for their answer fall into step, one always behind the other. In two rounds each client sends the
same two sets of requests; the medians of the rounds must agree within 10 %.

    python -m bench.clock [--model DIR] [--output FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from bench import REPOSITORY
from bench.lab import environment, models
from bench.lab.server_metrics import scrape
from bench.lab.servers import CPU_ARGS, CPU_ENV, Server, serving
from hiqcache import direct_http
from loadtest.workloads import Chat

#: bench_serving's own names for the medians of what Summary.to_dict calls by the key.
MEDIANS = {
    "ttft": "median_ttft_ms",
    "tpot": "median_tpot_ms",
    "itl": "median_itl_ms",
    "e2e": "median_e2e_latency_ms",
}

TOLERANCE = 0.10
REQUESTS = 40
#: Requests a second of each client: together they keep a server that takes 1.7 s for one half busy.
RATE = 0.15
#: Seconds for bench_serving's imports.
STARTS_WITHIN_S = 120
LOCUSTFILE = REPOSITORY / "loadtest" / "locustfile.py"


def workload(seed: int) -> Chat:
    """What is sent: text, so that every token shows as such to a client that waits for text."""
    return Chat(seed, systems=4, system_words=120, question_words=20, turns=1, output_tokens=16)


class Tool(NamedTuple):
    """A client to start, and where it leaves what it found."""

    command: list[str]
    output: Path


def bench_serving(server: Server, folder: Path, seed: int) -> Tool:
    """SGLang's client, with the requests of ``seed``."""
    output, dataset = folder / f"bench-{seed}.jsonl", folder / f"requests-{seed}.jsonl"
    conversations = itertools.islice(workload(seed).conversations(), REQUESTS)
    bodies = (next(conversation.turns).body() for conversation in conversations)
    dataset.write_text("".join(json.dumps(body) + "\n" for body in bodies), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", server.url, "--model", str(server.model)),
        *("--dataset-name", "openai", "--dataset-path", str(dataset)),
        *("--num-prompts", str(REQUESTS), "--request-rate", str(RATE), "--seed", str(seed)),
        *("--warmup-requests", "0"),
        *("--disable-tqdm", "--output-file", str(output)),
    ]
    return Tool(command, output)


def bench_serving_medians(output: Path) -> dict[str, float]:
    """Its medians in seconds."""
    found = json.loads(output.read_text().splitlines()[-1])
    if found["completed"] != REQUESTS:
        raise RuntimeError(f"bench_serving completed {found['completed']} of {REQUESTS} requests")
    return {name: found[key] / 1000 for name, key in MEDIANS.items()}


def locust(server: Server, folder: Path, seed: int) -> Tool:
    """The Locust file, with the requests of ``seed``."""
    output, chat = folder / f"locust-{seed}.json", workload(seed)
    command = [
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"),
        *("--arms", f"server={server.url}", "--users", "8", "--rate", str(RATE)),
        *("--workload", chat.name),
        *("--systems", str(chat.systems), "--system-words", str(chat.system_words)),
        *("--question-words", str(chat.question_words), "--turns", str(chat.turns)),
        *("--output-tokens", str(chat.output_tokens), "--requests", str(REQUESTS)),
        *("--seed", str(seed), "--metrics-port", "0", "--result-file", str(output)),
    ]
    return Tool(command, output)


def locust_medians(output: Path) -> dict[str, float]:
    """Its medians in seconds."""
    found = json.loads(output.read_text())["arms"][workload(0).name]["server"]
    if found["requests"]["ok"] != REQUESTS:
        raise RuntimeError(f"Locust's requests ended as {found['requests']}")
    return {name: found["seconds"][name]["p50"] for name in MEDIANS}


TOOLS = {
    "bench_serving": (bench_serving, bench_serving_medians),
    "locust": (locust, locust_medians),
}


def compare(folder: Path, model_folder: Path, rounds: int) -> dict[str, Any]:
    """Run both ``rounds`` times on one server; returns what goes into the result file."""
    server = Server(
        "server",
        model_folder,
        folder / "server.log",
        (*CPU_ARGS, "--max-total-tokens", "4096"),
        # One thread: a client that takes a core must not take it from the server it times.
        {**CPU_ENV, "HIQCACHE_CODEC": "bf16", "OMP_NUM_THREADS": "1"},
    )
    medians: dict[str, list[dict[str, float]]] = {name: [] for name in TOOLS}
    commands: dict[str, str] = {}
    with serving(server):
        for number in range(rounds):
            direct_http.post(f"{server.url}/flush_cache", timeout=60)
            first = number // 2 * 2
            seeds = (first, first + 1) if number % 2 == 0 else (first + 1, first)
            tools = {
                name: make(server, folder, seed)
                for seed, (name, (make, _)) in zip(seeds, TOOLS.items(), strict=True)
            }
            _run_together(tools, server, folder)
            for name, tool in tools.items():
                commands.setdefault(name, _public(tool.command, server, folder))
                found = TOOLS[name][1](tool.output)
                medians[name].append(found)
                figures = ", ".join(f"{key} {value * 1000:.1f} ms" for key, value in found.items())
                print(f"round {number + 1}/{rounds}, {name}: {figures}", flush=True)
    agreed = {}
    for key in MEDIANS:
        ours, theirs = (
            statistics.median(row[key] for row in medians[name])
            for name in ("locust", "bench_serving")
        )
        agreed[key] = {
            "locust_s": ours,
            "bench_serving_s": theirs,
            "ratio": ours / theirs,
            "within_tolerance": abs(ours / theirs - 1) <= TOLERANCE,
        }
    return {
        "command": f"python -m bench.clock --rounds {rounds}",
        "machine": f"{os.cpu_count()} CPUs ({platform.machine()}), no GPU",
        "versions": {name: version(name) for name in ("sglang", "torch", "locust")},
        "environment": environment.describe(),
        "model": model_folder.name,
        "commands": commands,
        "tolerance": TOLERANCE,
        "requests_a_round": REQUESTS,
        "requests_a_second": RATE,
        "medians_of_rounds": agreed,
        "rounds": medians,
    }


def _run_together(tools: dict[str, Tool], server: Server, folder: Path) -> None:
    """Run both clients; Locust, which is up in no time, once bench_serving has its first answer."""
    variables = {"HF_HUB_OFFLINE": "1", "HOME": str(folder), "NO_PROXY": "127.0.0.1"}
    answered = _answered(server)
    with ExitStack() as running:
        started = {}
        for name, tool in tools.items():
            log = running.enter_context((folder / f"{name}.log").open("w+"))
            started[name] = running.enter_context(
                subprocess.Popen(
                    tool.command, env={**os.environ, **variables}, stdout=log, stderr=log
                )
            )
            running.callback(started[name].kill)
            deadline = time.monotonic() + STARTS_WITHIN_S
            while _answered(server) == answered and started[name].poll() is None:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{name} had no answer within {STARTS_WITHIN_S} s")
                time.sleep(0.2)
        for name, process in started.items():
            if process.wait(timeout=600):
                said = (folder / f"{name}.log").read_text()[-3000:]
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{said}")


def _answered(server: Server) -> float:
    """Requests that the server has answered since it started."""
    return scrape(server).get("sglang:num_requests_total", 0.0)


def _public(command: list[str], server: Server, folder: Path) -> str:
    """The command without this machine's paths."""
    text = " ".join(["python", *command[1:]]).replace(server.url, "URL")
    text = text.replace(str(server.model), server.model.name).replace(f"{folder}/", "")
    return text.replace(str(LOCUSTFILE), "loadtest/locustfile.py")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.clock", description=__doc__)
    parser.add_argument("--model", type=Path, default=models.DEFAULT)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hiqcache-compare-") as folder:
        result = compare(Path(folder), models.prepare(options.model), options.rounds)
    text = json.dumps(result, indent=2) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(row["within_tolerance"] for row in result["medians_of_rounds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
