"""Checks the Locust file's clock against SGLang's own bench_serving, on the same server.

Both send the same requests to the same endpoint, one at a time and in turn, with the caches flushed
before each; the medians of the rounds must agree within 10 %.

    python -m loadtest.compare_bench_serving [--model DIR] [--output FILE]
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
from importlib.metadata import version
from pathlib import Path
from typing import Any

import requests

from loadtest import model
from loadtest.servers import CPU_ARGS, CPU_ENV, Server, serving
from loadtest.workloads import Chat

#: bench_serving's own names for the medians of what Summary.to_dict calls by the key.
MEDIANS = {
    "ttft": "median_ttft_ms",
    "tpot": "median_tpot_ms",
    "itl": "median_itl_ms",
    "e2e": "median_e2e_latency_ms",
}

TOLERANCE = 0.10
REQUESTS = 16
LOCUSTFILE = Path(__file__).with_name("locustfile.py")


def workload(seed: int) -> Chat:
    """What is sent: text, so that every token shows as such to a client that waits for text."""
    return Chat(seed, systems=4, system_words=120, question_words=20, turns=1, output_tokens=16)


def bench_serving(server: Server, folder: Path, seed: int) -> tuple[list[str], dict[str, float]]:
    """Run bench_serving; returns its command and its medians in seconds."""
    output, dataset = folder / f"bench-{seed}.jsonl", folder / f"requests-{seed}.jsonl"
    conversations = itertools.islice(workload(seed).conversations(), REQUESTS)
    bodies = (next(conversation.turns).body() for conversation in conversations)
    dataset.write_text("".join(json.dumps(body) + "\n" for body in bodies), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", server.url, "--model", str(server.model)),
        *("--dataset-name", "openai", "--dataset-path", str(dataset)),
        *("--num-prompts", str(REQUESTS), "--max-concurrency", "1", "--warmup-requests", "0"),
        *("--disable-tqdm", "--output-file", str(output)),
    ]
    _run(command, folder)
    found = json.loads(output.read_text().splitlines()[-1])
    if found["completed"] != REQUESTS:
        raise RuntimeError(f"bench_serving completed {found['completed']} of {REQUESTS} requests")
    return command, {name: found[key] / 1000 for name, key in MEDIANS.items()}


def locust(server: Server, folder: Path, seed: int) -> tuple[list[str], dict[str, float]]:
    """Run the Locust file; returns its command and its medians in seconds."""
    output, chat = folder / f"locust-{seed}.json", workload(seed)
    command = [
        *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary"),
        *("--arms", f"server={server.url}", "--users", "1", "--workload", chat.name),
        *("--systems", str(chat.systems), "--system-words", str(chat.system_words)),
        *("--question-words", str(chat.question_words), "--turns", str(chat.turns)),
        *("--output-tokens", str(chat.output_tokens), "--requests", str(REQUESTS)),
        *("--seed", str(seed), "--metrics-port", "0", "--result-file", str(output)),
    ]
    _run(command, folder)
    found = json.loads(output.read_text())["arms"][chat.name]["server"]
    if found["requests"]["ok"] != REQUESTS:
        raise RuntimeError(f"Locust's requests ended as {found['requests']}")
    return command, {name: found["seconds"][name]["p50"] for name in MEDIANS}


def compare(folder: Path, model_folder: Path, rounds: int) -> dict[str, Any]:
    """Run both in turn ``rounds`` times on one server; returns what goes into the result file."""
    server = Server(
        "server",
        model_folder,
        folder / "server.log",
        (*CPU_ARGS, "--max-total-tokens", "4096"),
        # One thread: a client that takes a core must not take it from the server it times.
        {**CPU_ENV, "HIQCACHE_CODEC": "bf16", "OMP_NUM_THREADS": "1"},
    )
    tools = {"bench_serving": bench_serving, "locust": locust}
    medians: dict[str, list[dict[str, float]]] = {name: [] for name in tools}
    commands: dict[str, str] = {}
    with serving(server):
        for seed in range(rounds):
            # Taking turns to go first spreads whatever else the machine does over both.
            for name in list(tools)[:: 1 if seed % 2 == 0 else -1]:
                requests.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()
                command, found = tools[name](server, folder, seed)
                commands.setdefault(name, _public(command, server, folder))
                medians[name].append(found)
                figures = ", ".join(f"{key} {value * 1000:.1f} ms" for key, value in found.items())
                print(f"round {seed + 1}/{rounds}, {name}: {figures}", flush=True)
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
        "command": "python -m loadtest.compare_bench_serving",
        "machine": f"{os.cpu_count()} CPUs ({platform.machine()}), no GPU",
        "versions": {name: version(name) for name in ("sglang", "torch", "locust")},
        "model": model_folder.name,
        "commands": commands,
        "tolerance": TOLERANCE,
        "medians_of_rounds": agreed,
        "rounds": medians,
    }


def _run(command: list[str], folder: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HOME": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}"
            f"{done.stderr[-2000:]}"
        )


def _public(command: list[str], server: Server, folder: Path) -> str:
    """The command without this machine's paths."""
    text = " ".join(["python", *command[1:]]).replace(server.url, "URL")
    text = text.replace(str(server.model), server.model.name).replace(f"{folder}/", "")
    return text.replace(str(LOCUSTFILE), "loadtest/locustfile.py")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.compare_bench_serving", description=__doc__
    )
    parser.add_argument("--model", type=Path, default=model.DEFAULT)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hiqcache-compare-") as folder:
        result = compare(Path(folder), model.prepare(options.model), options.rounds)
    text = json.dumps(result, indent=2) + "\n"
    if options.output:
        options.output.write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(row["within_tolerance"] for row in result["medians_of_rounds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
