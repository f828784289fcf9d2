"""What is due, in which order, and whose turn it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.lab.arms import arm_named
from bench.lab.shapes import QWEN3_8B
from bench.tiers.measure import missing, turns
from bench.tiers.plan import CPU, experiment
from bench.tiers.runs import RunLog

ARMS_OF_SWEEP = (arm_named("bf16"), arm_named("int8"))
SETUP = {"model": "m", "environment": {"versions": {}, "cpu": "c", "gpus": []}}


@pytest.fixture
def log(tmp_path: Path) -> RunLog:
    return RunLog(tmp_path / "runs.jsonl", SETUP)


def run(
    name: str, point: str, repeat: int, arm: str, started: float = 1.0, **more: Any
) -> dict[str, Any]:
    of = {"experiment": name, "point": point, "repeat": repeat, "arm": arm, "started": started}
    return {**of, "workload": {"turn": 2 if name == "sweep" else None}, "invalid": [], **more}


def test_every_point_comes_once_before_any_comes_again(log: RunLog) -> None:
    plan = experiment("sweep", ARMS_OF_SWEEP, CPU, QWEN3_8B, repeats=4)
    due = [(each.point.name, each.repeat) for each in missing(plan, log)]
    points = [point.name for point in plan.points]
    assert due[: len(points)] == [(name, 0) for name in points]
    assert [repeat for _, repeat in due] == sorted(repeat for _, repeat in due)
    assert len(due) == sum(point.repeats for point in plan.points)


def test_arms_that_take_turns_are_measured_again_together(log: RunLog) -> None:
    plan = experiment("sweep", ARMS_OF_SWEEP, CPU, QWEN3_8B, repeats=1)
    first = plan.points[0].name
    log.add(run("sweep", first, 0, "bf16"))
    log.add(run("sweep", first, 0, "int8", invalid=["the load generator was held up"]))
    due = missing(plan, log)[0]
    assert (due.point.name, due.arms) == (first, ARMS_OF_SWEEP)
    log.add(run("sweep", first, 0, "int8", started=2.0))  # from another sitting than BF16's
    assert missing(plan, log)[0].point.name == first
    log.add(run("sweep", first, 0, "bf16", started=2.0))
    assert missing(plan, log)[0].point.name != first


def test_runs_from_before_arms_took_turns_do_not_count_as_such(log: RunLog) -> None:
    plan = experiment("sweep", ARMS_OF_SWEEP, CPU, QWEN3_8B, repeats=1)
    first = plan.points[0].name
    for arm in ("bf16", "int8"):
        log.add(run("sweep", first, 0, arm, workload={}))
    assert missing(plan, log)[0].point.name == first


def test_arms_that_do_not_are_measured_one_by_one(log: RunLog) -> None:
    plan = experiment("same-bytes", ARMS_OF_SWEEP, CPU, QWEN3_8B, repeats=2)
    (point,) = plan.points
    log.add(run("same-bytes", point.name, 0, "bf16"))
    due = [(each.repeat, [arm.name for arm in each.arms]) for each in missing(plan, log)]
    assert due == [(0, ["int8"]), (1, ["int8"]), (1, ["bf16"])]


def test_arms_take_turns_in_an_order_that_is_turned_round() -> None:
    prompts = [[1], [2], [3], [4], [5]]
    assert list(turns(["x", "y"], prompts, 2)) == [
        ("x", [[1], [2]]),
        ("y", [[1], [2]]),
        ("y", [[3], [4]]),
        ("x", [[3], [4]]),
        ("x", [[5]]),
        ("y", [[5]]),
    ]
    assert list(turns(["x", "y"], prompts, None)) == [("x", prompts), ("y", prompts)]
