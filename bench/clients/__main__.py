"""Runs clients that no one here wrote against both arms, beside our clock.

    AIPERF=aiperf MULTITURN=bench_multiturn.py python -m bench.clients [--clients ...] [--out FILE]

sglang.bench_serving, SGLang's bench_multiturn, AIPerf and the openai package. Each talks to its
server through a recorder that hands every byte on and times the streams as the load generator does.
So the two see the same requests, and their medians of TTFT and TPOT and their cached tokens must
agree within 5 %.

MULTITURN names benchmark/hicache/bench_multiturn.py of SGLang's repository, which its wheel does
not carry. AIPerf wants other versions than SGLang: it gets an environment of its own (pip install
aiperf==0.13.0), and AIPERF names the program there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import REPOSITORY
from bench.clients.recorder import Recorder
from bench.clients.shape import GROUPS
from bench.clients.tools import (
    TOOLS,
    ClientError,
    Figures,
    Setting,
    aiperf_program,
    multiturn_script,
)
from bench.lab import environment, models
from bench.lab.servers import CPU_ARGS, CPU_ENV, Server, free_port, serving
from hiqcache import direct_http

TOLERANCE = 0.05
L1_TOKENS = 1024


def compared(theirs: Figures, ours: Figures) -> dict[str, Any]:
    """A client's figures beside the recorder's, and whether each agrees.

    A client that has no word for a figure is not asked for it.
    """
    return {
        name: {
            "client": theirs[name],
            "recorder": ours[name],
            "agrees": abs(theirs[name] - ours[name]) <= TOLERANCE * abs(ours[name]),
        }
        for name in theirs
    }


def measure(arm: str, model: Path, names: list[str], requests: int, folder: Path) -> dict[str, Any]:
    """Every client against one arm, from an empty cache each."""
    server = Server(
        f"the {arm} server",
        model,
        folder / f"{arm}.log",
        (*CPU_ARGS, "--max-total-tokens", str(L1_TOKENS), "--served-model-name", model.name),
        {**CPU_ENV, "HIQCACHE_CODEC": arm},
    )
    found = {}
    with serving(server):
        for name in names:
            direct_http.post(f"{server.url}/flush_cache")
            own = folder / f"{arm}-{name}"
            own.mkdir()
            with Recorder(server.url, free_port()).serving() as recorder:
                theirs = TOOLS[name](Setting(recorder.url, model, own, requests))
            found[name] = compared(theirs, recorder.figures())
            print(json.dumps({f"{arm} {name}": found[name]}, indent=2), flush=True)
    return found


def main() -> int:
    """The exit status: 1 where a client's figures are not ours."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="a local model; default: SmolLM2-135M")
    parser.add_argument("--arms", default="bf16,int8", help="default %(default)s")
    parser.add_argument("--clients", default=",".join(TOOLS), help="default %(default)s")
    parser.add_argument("--requests", type=int, default=48, help="of each client, by sixes")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "results/clients/cpu.json")
    arguments = parser.parse_args()
    names = arguments.clients.split(",")
    if unknown := set(names) - set(TOOLS):
        parser.error(f"no client called {', '.join(sorted(unknown))}: {', '.join(TOOLS)}.")
    if "aiperf" in names and shutil.which(aiperf_program()) is None:
        parser.error(
            f"{aiperf_program()} is no program: pip install aiperf==0.13.0 into an environment of "
            "its own, and name it: AIPERF=/path/to/aiperf. Or leave it out: --clients."
        )
    if "bench_multiturn" in names and not Path(multiturn_script()).exists():
        parser.error(
            f"{multiturn_script()} is no file: name SGLang's benchmark/hicache/bench_multiturn.py, "
            "MULTITURN=/path/to/bench_multiturn.py. Or leave it out: --clients."
        )
    if arguments.requests % GROUPS or arguments.requests < GROUPS:
        parser.error(f"--requests {arguments.requests}: it must be a multiple of {GROUPS}.")
    model = arguments.model or models.prepare()
    document: dict[str, Any] = {
        "command": " ".join(["python -m bench.clients", *sys.argv[1:]]),
        "model": model.name,
        "tolerance": TOLERANCE,
        "environment": environment.describe(),
        "arms": {},
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            for arm in arguments.arms.split(","):
                document["arms"][arm] = measure(arm, model, names, arguments.requests, Path(folder))
    except ClientError as error:
        print(f"bench.clients: {error}", file=sys.stderr)
        return 1
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=2) + "\n")
    apart = [
        f"{arm} {client} {figure}"
        for arm, clients in document["arms"].items()
        for client, figures in clients.items()
        for figure, values in figures.items()
        if not values["agrees"]
    ]
    if apart:
        print(f"bench.clients: not within {TOLERANCE:.0%}: {', '.join(apart)}", file=sys.stderr)
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
