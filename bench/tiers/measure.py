"""Takes the runs that are due, on servers that are up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.lab.arms import Arm
from bench.lab.client import Client, Timing, closed_loop, undisturbed
from bench.lab.servers import CPU_ARGS, CPU_ENV, GPU_ARGS, Server
from bench.tiers.checks import deltas, reasons_disturbed, reasons_invalid
from bench.tiers.disk import Held, held
from bench.tiers.plan import WARM_UP_S, Experiment, Point, Scale
from bench.tiers.progress import Progress
from bench.tiers.runs import Run, RunLog, turn_of
from bench.tiers.settle import settled, warm_up
from hiqcache.geometry import KVGeometry

Prompt = Sequence[int]

#: Before each turn, for what the other arm's server still writes to L2.
TURN_PAUSE_S = 0.1


@dataclass(frozen=True)
class Bench:
    """What is measured, where, and with what.

    geometry: of one rank.
    disk: the folder for L3; None: beside the logs.
    """

    model: Path
    geometry: KVGeometry
    scale: Scale
    cpu: bool
    server_args: tuple[str, ...]
    logs: Path
    disk: Path | None = None

    def folder(self, arm: Arm) -> Path:
        """Where the arm's L3 lies, if it has one."""
        return (self.disk or self.logs) / "hiqcache-bench-l3" / arm.file_name

    def server(self, plan: Experiment, arm: Arm) -> Server:
        """The arm's server, not yet started."""
        return Server(
            arm.name,
            self.model,
            self.logs / f"{plan.name}-{arm.file_name}.log",
            (
                *(CPU_ARGS if self.cpu else GPU_ARGS),
                *plan.server_args(arm, self.geometry),
                *(plan.disk.args(self.folder(arm)) if plan.disk else ()),
                *self.server_args,
            ),
            {**(CPU_ENV if self.cpu else {}), **plan.server_env(arm)},
        )


class Due(NamedTuple):
    """A run of each of ``arms``, with the same prompts; where they take turns, of every arm."""

    point: Point
    repeat: int
    arms: tuple[Arm, ...]


def missing(plan: Experiment, log: RunLog) -> list[Due]:
    """What is still to do, repeat by repeat, arms turned round in between.

    So that a bench that is cut short has every point, if less often.
    """
    due = []
    for repeat in range(max(point.repeats for point in plan.points)):
        arms = plan.arms if repeat % 2 == 0 else plan.arms[::-1]
        for point in (point for point in plan.points if repeat < point.repeats):
            runs = [log.find(plan.name, point.name, repeat, arm.name) for arm in arms]
            left = [arm for arm, run in zip(arms, runs, strict=True) if run is None]
            if point.turn is None:
                due += [Due(point, repeat, (arm,)) for arm in left]
            elif left or not _took_turns([run for run in runs if run], point.turn):
                due.append(Due(point, repeat, arms))
    return due


def _took_turns(runs: Sequence[Run], turn: int) -> bool:
    """Whether the runs' arms took turns of ``turn`` requests with each other."""
    begun = {turn_of(run) for run in runs}
    return len(begun) == 1 and begun.pop()[0] == turn


def turns(
    arms: Sequence[str], prompts: Sequence[Prompt], turn: int | None
) -> Iterator[tuple[str, Sequence[Prompt]]]:
    """Whose turn it is, with which prompts: each arm's are all of them, in order."""
    turn = turn or len(prompts)
    for number, first in enumerate(range(0, len(prompts), turn)):
        for arm in arms if number % 2 == 0 else arms[::-1]:
            yield arm, prompts[first : first + turn]


async def run_all(
    bench: Bench,
    plan: Experiment,
    urls: dict[str, str],
    due: Sequence[Due],
    log: RunLog,
    progress: Progress,
) -> None:
    """Warm up the servers at ``urls``, by arm, and take what is ``due`` while there is time."""
    for name, url in urls.items():
        progress.say(f"experiment {plan.name}: warming up {name}")
        async with Client(url) as client:
            await warm_up(client, plan.points[0])
        progress.done(WARM_UP_S)
    for each in due:
        if progress.over:
            return
        arms = " and ".join(arm.name for arm in each.arms)
        progress.say(f"experiment {plan.name}, {each.point.name}, repeat {each.repeat + 1}: {arms}")
        for run in await _run(bench, plan, each, urls):
            log.add(run)
        capacities = (plan.keeps(arm, bench.geometry) for arm in each.arms)
        speed = bench.scale.speed
        progress.done(sum(each.point.seconds(speed, capacity) for capacity in capacities))


async def _run(
    bench: Bench, plan: Experiment, due: Due, urls: dict[str, str]
) -> list[dict[str, Any]]:
    """A run of each arm that is due: all from empty caches, then measured in turns."""
    point, names = due.point, [arm.name for arm in due.arms]
    fill, measured = point.prompts(seed=due.repeat)
    before, filled = {}, {}
    for name in names:
        async with Client(urls[name]) as client:
            await client.flush()
            if plan.disk:
                await client.clear_storage()
            before[name] = await client.metrics()
            filled[name], _ = await closed_loop(client, fill, 1, point.concurrency)
            await settled(client)
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    elapsed = dict.fromkeys(names, 0.0)
    async with AsyncExitStack() as stack:
        clients = {name: await stack.enter_async_context(Client(urls[name])) for name in names}
        started = time.time()
        async with undisturbed() as held_up:
            for name, prompts in turns(names, measured, point.turn):
                if point.turn is not None:
                    await asyncio.sleep(TURN_PAUSE_S)
                taken, seconds = await closed_loop(
                    clients[name], prompts, point.output, point.concurrency
                )
                timings[name] += taken
                elapsed[name] += seconds
        ended = time.time()
        after = {name: await settled(client) for name, client in clients.items()}
    left = {arm.name: _left_on_disk(bench, plan, arm) for arm in due.arms}
    # What spoils one arm's run spoils those that took turns with it.
    invalid = [
        reason
        for arm in due.arms
        for reason in (
            *reasons_invalid(
                plan,
                arm,
                bench.geometry,
                [*filled[arm.name], *timings[arm.name]],
                before[arm.name],
                after[arm.name],
            ),
            *reasons_disturbed(timings[arm.name], held_up.seconds),
            *left[arm.name].invalid,
        )
    ]
    return [
        {
            **_described(bench, plan, due, arm),
            **left[arm.name].figures,
            "started": started,
            "ended": ended,
            "seconds": elapsed[arm.name],
            "held_up_ms": round(held_up.seconds * 1e3, 3),
            "requests": [timing.as_dict() for timing in timings[arm.name]],
            "metrics": deltas(before[arm.name], after[arm.name]),
            "invalid": invalid,
        }
        for arm in due.arms
    ]


def _described(bench: Bench, plan: Experiment, due: Due, arm: Arm) -> dict[str, Any]:
    """What a run is of."""
    point = due.point
    return {
        "experiment": plan.name,
        "point": point.name,
        "repeat": due.repeat,
        "arm": arm.name,
        "workload": {
            "groups": point.groups,
            "prefix": point.prefix,
            "suffix": point.suffix,
            "output": point.output,
            "requests": point.requests,
            "concurrency": point.concurrency,
            "fill": point.fill,
            "choice": point.choice,
            "turn": point.turn,
        },
        "l1_tokens": plan.l1_of(arm),
        "l2_tokens": plan.capacity(arm, bench.geometry),
        "bytes_per_token": plan.bytes_per_token(arm, bench.geometry),
        "stock_tokens": plan.scale.stock_tokens(bench.geometry),
    }


class _Left(NamedTuple):
    """What a run left on disk, for its line, and why that makes it invalid."""

    figures: dict[str, Any]
    invalid: list[str]


def _left_on_disk(bench: Bench, plan: Experiment, arm: Arm) -> _Left:
    if plan.disk is None:
        return _Left({}, [])
    found = held(bench.folder(arm))
    # A rank's files are as many as any other's.
    found = Held(*(number // bench.scale.shards.tp_size for number in found))
    page_bytes = plan.bytes_per_token(arm, bench.geometry) * plan.scale.page_size
    figures = {
        "cap_bytes": plan.disk.nbytes,
        "cap_tokens": plan.disk_tokens(arm, bench.geometry),
        "page_size": plan.scale.page_size,
        "page_bytes": page_bytes,
        "held_files": found.files,
        "held_bytes": found.nbytes,
    }
    return _Left({"disk": figures}, plan.disk.reasons_invalid(found, page_bytes))
