"""The clients: how each is started against a server, and where its figures are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench import REPOSITORY
from bench.clients.shape import GROUPS, OUTPUT_TOKENS, PREFIX_TOKENS, SUFFIX_TOKENS
from hiqcache import direct_http

Figures = dict[str, float]


class ClientError(RuntimeError):
    """A client did not run to its end; the text shows its log."""


@dataclass(frozen=True)
class Setting:
    """Where a client runs: the server's address, the model's folder, a folder for its files.

    requests: how many it sends, a multiple of GROUPS.
    """

    url: str
    model: Path
    folder: Path
    requests: int


def _run(command: list[str], setting: Setting, name: str, **env: str) -> None:
    log = setting.folder / f"{name}.log"
    variables = {"HOME": str(setting.folder), **direct_http.past_proxies(), **env}
    with log.open("wb") as output:
        done = subprocess.run(
            command,
            cwd=setting.folder,
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=1200,
        )
    if done.returncode:
        raise ClientError(f"{name} ended with {done.returncode}:\n{log.read_text()[-3000:]}")


def bench_serving(setting: Setting) -> Figures:
    """sglang.bench_serving, its own shared prefixes and cache report."""
    output = setting.folder / "bench_serving.jsonl"
    command = [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", setting.url, "--model", str(setting.model)),
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", str(GROUPS)),
        *("--gsp-prompts-per-group", str(setting.requests // GROUPS)),
        *("--gsp-system-prompt-len", str(PREFIX_TOKENS)),
        *("--gsp-question-len", str(SUFFIX_TOKENS), "--gsp-output-len", str(OUTPUT_TOKENS)),
        *("--max-concurrency", "1", "--warmup-requests", "0", "--cache-report", "--disable-tqdm"),
        *("--output-file", str(output), "--output-details", "--seed", "1"),
    ]
    _run(command, setting, "bench_serving", HF_HUB_OFFLINE="1")
    found = json.loads(output.read_text().splitlines()[-1])
    return {
        "requests": found["completed"],
        "ttft_s": found["median_ttft_ms"] / 1e3,
        "tpot_s": found["median_tpot_ms"] / 1e3,
        "cached_tokens": found["cache_report"]["total_cached_tokens"],
    }


def bench_multiturn(setting: Setting) -> Figures:
    """SGLang's bench_multiturn.py, of its repository's benchmark/hicache, which MULTITURN names.

    It reports times to the first token alone. Each client sends its history again and more.
    """
    output = setting.folder / "multiturn.jsonl"
    parts = urlsplit(setting.url)
    command = [
        *(sys.executable, multiturn_script(), "--model-path", str(setting.model)),
        *("--host", str(parts.hostname), "--port", str(parts.port)),
        *("--num-clients", str(GROUPS), "--num-rounds", str(setting.requests // GROUPS)),
        *("--request-length", "64", "--output-length", str(OUTPUT_TOKENS)),
        *("--max-parallel", "1", "--request-rate", "100", "--disable-auto-run"),
        *("--disable-random-sample", "--log-file", str(output), "--seed", "1"),
    ]
    _run(command, setting, "bench_multiturn", HF_HUB_OFFLINE="1")
    found = json.loads(output.read_text().splitlines()[-1])["summary"]
    return {"requests": found["total_requests"], "ttft_s": found["median_ttft"]}


def multiturn_script() -> str:
    """The script that MULTITURN names."""
    return os.environ.get("MULTITURN", "bench_multiturn.py")


def aiperf(setting: Setting) -> Figures:
    """NVIDIA's AIPerf, from an environment of its own that AIPERF names."""
    output = setting.folder / "aiperf"
    command = [
        *(aiperf_program(), "profile", "--model", setting.model.name),
        *("--tokenizer", str(setting.model), "--url", setting.url),
        *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
        *("--num-prefix-prompts", str(GROUPS), "--prefix-prompt-length", str(PREFIX_TOKENS)),
        *("--isl", str(SUFFIX_TOKENS), "--isl-stddev", "0", "--osl", str(OUTPUT_TOKENS)),
        *("--osl-stddev", "0", "--extra-inputs", "ignore_eos:true"),
        *("--concurrency", "1", "--request-count", str(setting.requests), "--random-seed", "1"),
        *("--output-artifact-dir", str(output), "--ui", "none"),
    ]
    # Told to be offline, it looks for a model's folder in the hub's cache.
    _run(command, setting, "aiperf")
    found = json.loads((output / "profile_export_aiperf.json").read_text())
    return {
        "requests": found["request_count"]["avg"],
        "ttft_s": found["time_to_first_token"]["p50"] / 1e3,
        "tpot_s": found["inter_token_latency"]["p50"] / 1e3,
        "cached_tokens": found["total_usage_prompt_cache_read_tokens"]["avg"],
    }


def aiperf_program() -> str:
    """The program that AIPERF names."""
    return os.environ.get("AIPERF", "aiperf")


def openai(setting: Setting) -> Figures:
    """The openai package, in a process of its own: the recorder would share its interpreter."""
    output = setting.folder / "openai.json"
    command = [sys.executable, "-m", "bench.clients.openai_loop", setting.url, str(output)]
    _run([*command, str(setting.requests)], setting, "openai", PYTHONPATH=str(REPOSITORY))
    found: Figures = json.loads(output.read_text())
    return found


TOOLS: dict[str, Callable[[Setting], Figures]] = {
    "bench_serving": bench_serving,
    "bench_multiturn": bench_multiturn,
    "aiperf": aiperf,
    "openai": openai,
}
