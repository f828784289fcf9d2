"""The models people run, by their KV geometry: capacity, restored answers, restore times.

For each family a model of random weights (bench.models.families), one server an arm, all at the
same time. First what bench.verify does: capacity, exact restores, thousands of requests under
pressure. Then, when nothing else runs, the time of restores, server by server, by SGLang's metrics.

Writes a record for each family and arm as soon as there is something in it. A family that fails, or
takes longer than --limit, leaves its record with the last lines of its server's log, and the others
go on. Ends with status 1 where a record has problems.

    python -m bench.models --out FILE [--families mla,gpt-oss] [-- SGLANG ARGS]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from bench.lab import random_model, shards
from bench.lab.arms import NAMES, arm_named, arms_argument
from bench.models.families import SUBJECTS, Subject
from bench.models.family_run import serve
from bench.models.record import compared, line
from bench.verify.__main__ import made_with
from bench.verify.verdict import problems
from hiqcache.model import Model, read_model

#: Seconds that the restores of one family may take, and its servers' end.
TIMING = 120
ENDING = 45


class Running(NamedTuple):
    """A family at work, in a process of its own."""

    subject: Subject
    model: Model
    process: BaseProcess
    pipe: Connection


class Results:
    """The records, written to ``out`` at every change."""

    def __init__(self, out: Path, cut: shards.Shards, cpu: bool) -> None:
        # SGLang times no restore on a CPU.
        self._out, self._cut, self._cpu = out, cut, cpu
        self._records: list[dict[str, Any]] = []
        command = shlex.join(["python", "-m", "bench.models", *sys.argv[1:]])
        self._made_with = {"command": command, **made_with(), **cut._asdict()}

    def begin(self, subject: Subject, model: Model) -> None:
        """A record for each arm of ``subject``, empty so far."""
        for name in subject.arms:
            self._records.append(
                {
                    "family": subject.name,
                    "arm": name,
                    "table": model.family.key,
                    "geometry_of": subject.model,
                    "cut": subject.cut,
                    "pools": {pool.label: str(pool.geometry) for pool in model.pools},
                    "weights": "random",
                    "args": list(subject.args),
                }
            )
            self._judge(self._records[-1], subject, model)
        self._save()

    def add(self, running: Running, arm: str, name: str, figures: Any) -> None:
        """Figures of an arm, or of every arm of a family that is not over (arm empty)."""
        for record in self._records:
            if record["family"] == running.subject.name and (
                record["arm"] == arm or (not arm and "restores" not in record)
            ):
                record.setdefault(name, figures)
                self._judge(record, running.subject, running.model)
        self._save()

    def _judge(self, record: dict[str, Any], subject: Subject, model: Model) -> None:
        found = [record["failure"].splitlines()[0]] if "failure" in record else []
        arm = arm_named(record["arm"])
        found += problems(arm, record, subject.sizes, model.pools, self._cut)
        if not any(each["ms"] or self._cpu for each in record.get("restores", ())):
            found.append(f"{arm.name}: no restore was timed")
        record["problems"] = found

    def _save(self) -> None:
        self._out.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        """Everything that is written."""
        return {**self._made_with, "records": compared(self._records)}


def begin(subject: Subject, folder: Path, options: argparse.Namespace) -> Running:
    """Write the weights of ``subject`` under ``folder`` and start what serves it."""
    shape = folder / f"{subject.name}-shape"
    shape.mkdir()
    (shape / "config.json").write_text(json.dumps(dict(subject.config)))
    model = random_model.write(shape, folder / subject.name)
    here, there = multiprocessing.Pipe()
    cut = shards.chosen(options, options.cpu)
    logs = options.out.with_suffix("")
    further = shards.further_arguments(options.sglang)
    process = multiprocessing.get_context("spawn").Process(
        target=serve,
        args=(subject, model, logs, cut, further, options.cpu, options.timeout, there),
    )
    process.start()
    there.close()
    return Running(subject, read_model(model), process, here)


def heard(running: Sequence[Running], results: Results, until: str, limit: float) -> list[Running]:
    """Take what families send until each says ``until``; those that said so within ``limit`` s."""
    deadline, waiting, done = time.monotonic() + limit, list(running), []
    while waiting and time.monotonic() < deadline:
        ready = wait([each.pipe for each in waiting], timeout=1)
        for each in [each for each in waiting if each.pipe in ready]:
            try:
                arm, name, figures = each.pipe.recv()
            except EOFError:
                results.add(each, "", "failure", f"{each.subject.name} ended early")
                waiting.remove(each)
                continue
            if not arm:
                if name == until:
                    waiting.remove(each)
                    done.append(each)
                continue
            print(f"{each.subject.name} {arm} {name}: {str(figures)[:1500]}", flush=True)
            results.add(each, arm, name, figures)
    for each in waiting:
        results.add(each, "", "failure", f"{each.subject.name}: not {until} after {limit:.0f} s")
        # Its servers end with it (PR_SET_PDEATHSIG).
        each.process.terminate()
    return done


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--families", default=",".join(SUBJECTS), help="of " + ", ".join(SUBJECTS))
    parser.add_argument(
        "--arms", type=arms_argument, help=f"bf16 first, instead of each family's own; {NAMES}"
    )
    parser.add_argument("--cpu", action="store_true", help="mla alone, cut to what a CPU serves")
    shards.add_arguments(parser)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for a start")
    parser.add_argument("--limit", type=float, default=400, help="seconds until all is verified")
    parser.add_argument("sglang", nargs="*", help="arguments for SGLang, after --")
    options = parser.parse_args()
    names = ["mla"] if options.cpu else [name.strip() for name in options.families.split(",")]
    if unknown := [name for name in names if name not in SUBJECTS]:
        parser.error(f"no families {', '.join(unknown)}: give some of {', '.join(SUBJECTS)}")
    try:
        shards.further_arguments(options.sglang)
    except ValueError as error:
        parser.error(str(error))
    if options.tp_size != 1:
        parser.error("--tp-size: every server has one rank here")

    options.out.parent.mkdir(parents=True, exist_ok=True)
    results = Results(options.out, shards.chosen(options, options.cpu), options.cpu)
    shared = Path("/dev/shm")
    start = time.monotonic()
    running: list[Running] = []
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        try:
            for name in names:
                subject = SUBJECTS[name].on_cpu() if options.cpu else SUBJECTS[name]
                if options.arms:
                    subject = replace(subject, arms=tuple(arm.name for arm in options.arms))
                running.append(begin(subject, Path(folder), options))
                results.begin(subject, running[-1].model)
                print(f"{time.monotonic() - start:.0f} s: {name} starts", flush=True)
            for each in heard(running, results, "verified", options.limit):
                each.pipe.send("go")
                heard([each], results, "ended", TIMING)
                print(f"{time.monotonic() - start:.0f} s: {each.subject.name} is over", flush=True)
        finally:
            for each in running:
                each.process.terminate()
            for each in running:
                each.process.join(ENDING)
    records = results.as_json()["records"]
    for record in records:
        print(line(record))
    return 1 if any(record["problems"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
