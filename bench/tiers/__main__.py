"""Measures the arms against each other on real servers.

    python -m bench.tiers [--experiments same-tokens,same-bytes,sweep] [--plan] ...

An experiment is called by what it holds constant; the sweep holds the bytes too, and varies the
working set. l3, which runs where it is asked for, holds those of L2 and of a disk behind it:
SGLang's file backend, in a folder under --disk that is removed afterwards.

MODEL, HICACHE_GB, PAGE_SIZE, TP_SIZE, REPEATS, ARMS, EXPERIMENTS, DISK, SERVER_ARGS and OUT in the
environment set the defaults of the options with those names; --plan says how long it will take.
All servers of an experiment are up at once, so that the host holds L2 for each, and 10 GiB that
SGLang leaves free. They take load one at a time, in an order that is turned round from repeat to
repeat, and in the sweep in turns of as many requests as run at once; caches are flushed before each
run. Every run is a line of DIR/runs.jsonl as soon as it is over, so that an interrupted bench goes
on where it stopped. A run whose server is not what its layout says, or in which this process itself
was held up, is kept, marked, left out of every figure, and repeated next time; the bench then ends
with a non-zero status. With GRAFANA_URL and GRAFANA_TOKEN, the runs are marked in that Grafana
afterwards (monitoring.grafana_api, by the Python of GRAFANA_PYTHON).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from bench import REPOSITORY
from bench.lab import environment, shards
from bench.lab.arms import NAMES, arms_named
from bench.lab.client import BenchError
from bench.lab.models import prepare
from bench.lab.servers import ServerError, serving
from bench.tiers import report
from bench.tiers.disk import emptied
from bench.tiers.measure import Bench, missing, run_all
from bench.tiers.plan import (
    CPU,
    DEFAULT_EXPERIMENTS,
    EXPERIMENTS,
    GPU,
    Experiment,
    experiment,
)
from bench.tiers.progress import Progress
from bench.tiers.runs import RunLog
from hiqcache.model import read_model

#: Arms of each experiment, where ARMS is not given; the mover needs CUDA.
DEFAULT_ARMS = {
    "same-tokens": "bf16,int8:mover,int8",
    "same-bytes": "bf16,int8,int8-rot,fp8",
    "sweep": "bf16,int8",
    "l3": "bf16,int8",
}


def main() -> int:
    options = _options()
    if options.report_only:
        return 0 if _report(options.out) else 1
    try:
        bench, plans = _plans(options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.plan:
        _print_plan(plans, bench)
        return 0
    log = RunLog(options.out / "runs.jsonl", _setup(bench))
    if log.foreign:
        print(
            f"{options.out}/runs.jsonl holds {log.foreign} runs with another model, L2, page size, "
            "ranks, SGLang arguments, versions or hardware, which must not share a report with "
            "these: name another folder (--out, make bench OUT=DIR) or move that file away.",
            file=sys.stderr,
        )
        return 2
    began = time.time()
    deadline = time.monotonic() + options.budget if options.budget else None
    progress = Progress(
        sum(plan.seconds(bench.geometry) for plan in plans if missing(plan, log)), deadline
    )
    try:
        for plan in plans:
            _measure(bench, plan, log, progress)
    except (BenchError, ServerError, OSError, ExceptionGroup) as error:
        print(f"\n{_reason(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted: the same command goes on from here.", file=sys.stderr)
        return 130
    finally:
        if log.runs:
            _report(options.out)
            _annotate(options.out / "runs.jsonl", began)
    invalid = [run for run in log.latest() if run["invalid"]]
    for run in invalid:
        print(
            f"INVALID RUN: {run['experiment']} {run['point']} {run['arm']}: "
            + "; ".join(run["invalid"]),
            file=sys.stderr,
        )
    left = sum(len(due.arms) for plan in plans for due in missing(plan, log))
    if left:
        print(f"{left} runs are left: the same command goes on from here.")
    return 1 if invalid else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.tiers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    env = os.environ
    parser.add_argument(
        "--experiments",
        default=env.get("EXPERIMENTS") or ",".join(DEFAULT_EXPERIMENTS),
        help=f"of {', '.join(EXPERIMENTS)}",
    )
    parser.add_argument(
        "--points",
        default=env.get("POINTS") or "",
        help="of an experiment that has several: their names, with commas between",
    )
    parser.add_argument(
        "--model", type=Path, default=env.get("MODEL") or None, help="a local model folder"
    )
    parser.add_argument("--hicache-gb", type=int, default=int(env.get("HICACHE_GB") or 0))
    shards.add_arguments(parser, env)
    parser.add_argument("--repeats", type=int, default=int(env.get("REPEATS") or 4))
    parser.add_argument("--arms", default=env.get("ARMS") or None, help=f"bf16 and others: {NAMES}")
    parser.add_argument("--cpu", action="store_true", help="a small scale, SGLang on the CPU")
    parser.add_argument(
        "--server-args",
        default=env.get("SERVER_ARGS", ""),
        help="further SGLang arguments, quoted",
    )
    parser.add_argument(
        "--disk",
        type=Path,
        default=env.get("DISK") or None,
        help="a folder on the disk that l3 is about; default: in .cache",
    )
    parser.add_argument("--budget", type=float, help="seconds after which no run is started")
    parser.add_argument(
        "--report-only", action="store_true", help="write the report of --out again, from its JSON"
    )
    parser.add_argument("--plan", action="store_true", help="print what would run, and how long")
    parser.add_argument(
        "--out",
        type=Path,
        default=env.get("OUT") or None,
        help="default: results/<gpu or cpu>-<model>-<L2>, beside what this repository holds",
    )
    options = parser.parse_args()
    if options.report_only and options.out is None:
        parser.error("--report-only needs --out DIR (or OUT=DIR), the folder to report")
    options.cpu = options.cpu or not torch.cuda.is_available()
    if options.model is None and not options.cpu and not options.report_only:
        parser.error("--model DIR (or MODEL=DIR) names the model to serve")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1; intervals want at least 4")
    return options


def _slug() -> str:
    return torch.cuda.get_device_name(0).lower().replace("nvidia", "").strip().replace(" ", "-")


def _plans(options: argparse.Namespace) -> tuple[Bench, list[Experiment]]:
    model = options.model or prepare()
    cut = shards.chosen(options, options.cpu)
    geometry = read_model(model, cut.tp_size).geometry
    scale = replace(CPU if options.cpu else GPU, shards=cut)
    if options.hicache_gb:
        scale = replace(scale, l2_gigabytes=options.hicache_gb)
    if options.out is None:
        size = f"{scale.l2_gigabytes}gb" if scale.l2_gigabytes else "small"
        name = f"{'cpu' if options.cpu else _slug()}-{model.name}-{size}"
        options.out = REPOSITORY / "results" / name
    server_args = shards.further_arguments(options.server_args)
    names = [name.strip() for name in options.experiments.split(",") if name.strip()]
    plans = []
    for name in names:
        if name not in EXPERIMENTS:
            raise ValueError(
                f"there is no experiment {name!r}: choose from {', '.join(EXPERIMENTS)}."
            )
        chosen = arms_named(options.arms or DEFAULT_ARMS.get(name, ""))
        if options.cpu and options.arms is None:
            chosen = [arm for arm in chosen if arm.transfer != "mover"]
        if "bf16" not in {arm.name for arm in chosen}:
            raise ValueError("--arms lacks bf16, which all others are compared with.")
        if any(arm.quantises for arm in chosen) and "hiqcache" not in _plugins():
            raise ValueError(
                "SGLang does not see HiQCache, so every arm would be BF16: pip install . in this "
                "Python."
            )
        plan = experiment(name, tuple(chosen), scale, geometry, options.repeats)
        plan = plan.only([point.strip() for point in options.points.split(",") if point.strip()])
        for arm in chosen:
            # Raises ValueError for what its layout does not serve.
            plan.bytes_per_token(arm, geometry)
        plans.append(plan)
    bench = Bench(
        model,
        geometry,
        scale,
        options.cpu,
        server_args,
        REPOSITORY / ".cache" / "bench",
        options.disk,
    )
    return bench, plans


def _plugins() -> set[str]:
    return {point.name for point in entry_points(group="sglang.srt.plugins")}


def _report(out: Path) -> bool:
    """Write the report of ``out``; False where it holds nothing to report."""
    try:
        report.write(out)
    except ValueError as error:
        print(f"no report: {error}", file=sys.stderr)
        return False
    print(f"written: {out}/report.md, report.html and the JSON beside them")
    return True


def _setup(bench: Bench) -> dict[str, Any]:
    return {
        "model": bench.model.name,
        "model_config": environment.config_digest(bench.model),
        "l2_gigabytes": bench.scale.l2_gigabytes,
        **bench.scale.shards._asdict(),
        "dummy_weights": "dummy" in bench.server_args,
        "server_args": list(bench.server_args),
        "command": shlex.join(["python", "-m", "bench.tiers", *sys.argv[1:]]),
        "environment": environment.describe(),
    }


def _print_plan(plans: Sequence[Experiment], bench: Bench) -> None:
    for plan in plans:
        tp = bench.scale.shards.tp_size
        ranks = f"{tp} rank{'s' if tp > 1 else ''} per server"
        arms = ", ".join(
            f"{arm.name} ({plan.capacity(arm, bench.geometry):,} tokens)" for arm in plan.arms
        )
        print(
            f"{plan.name}: pages of {plan.scale.page_size}, {ranks}; L1 {plan.l1_tokens:,} tokens; "
            f"L2 {arms}; about {plan.seconds(bench.geometry) / 60:.1f} min"
        )
        if plan.disk:
            tokens = ", ".join(
                f"{arm.name} ({plan.disk_tokens(arm, bench.geometry):,} tokens)"
                for arm in plan.arms
            )
            folder = bench.folder(plan.arms[0]).parent
            print(f"  {plan.disk.nbytes / 1e9:.2f} GB per arm and rank in {folder}: {tokens}")
        for point in plan.points:
            print(
                f"  {point.name}: {point.groups} x {point.prefix} tokens"
                f"{', filled first' if point.fill else ''}, {point.requests} requests of "
                f"+{point.suffix} tokens and {point.output} out, {point.concurrency} at a time, "
                f"{point.repeats} times{', arms by turns' if point.turn else ''}"
            )
    total = sum(plan.seconds(bench.geometry) for plan in plans)
    print(f"about {total / 60:.0f} min in all")


def _measure(bench: Bench, plan: Experiment, log: RunLog, progress: Progress) -> None:
    due = missing(plan, log)
    if not due or progress.over:
        return
    arms = [arm for arm in plan.arms if any(arm in each.arms for each in due)]
    servers = [bench.server(plan, arm) for arm in arms]
    progress.say(f"experiment {plan.name}: starting {', '.join(arm.name for arm in arms)}")
    folders = [bench.folder(arm) for arm in arms] if plan.disk else []
    with emptied(*folders), serving(*servers, timeout=600):
        progress.done(bench.scale.speed.start_s)
        urls = {arm.name: server.url for arm, server in zip(arms, servers, strict=True)}
        asyncio.run(run_all(bench, plan, urls, due, log, progress))


def _annotate(runs: Path, began: float) -> None:
    """Mark the new runs in a Grafana, where one is named; whatever fails is one warning."""
    if not (os.environ.get("GRAFANA_URL") and os.environ.get("GRAFANA_TOKEN")):
        print("No Grafana annotations: GRAFANA_URL and GRAFANA_TOKEN are not both set.")
        return
    python = os.environ.get("GRAFANA_PYTHON") or sys.executable
    command = [python, "-m", "monitoring.grafana_api", str(runs.resolve()), "--since", str(began)]
    try:
        subprocess.run(command, cwd=REPOSITORY, check=False, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"No Grafana annotations: {error}", file=sys.stderr)


def _reason(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_reason(each) for each in error.exceptions)
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
