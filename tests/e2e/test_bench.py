"""A bench's runs on real servers: what is filled, whose turn it is, what is counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.lab import environment
from bench.lab.arms import arms_named
from bench.lab.servers import serving
from bench.lab.shards import Shards
from bench.tiers import measure
from bench.tiers.measure import Bench, missing, run_all
from bench.tiers.plan import CPU, Experiment, Scale, experiment
from bench.tiers.progress import Progress
from bench.tiers.runs import RunLog
from hiqcache.model import read_model

pytestmark = pytest.mark.e2e

SMALL = replace(CPU, shares=(), prefixes=(256,), requests=24)


@pytest.fixture(autouse=True)
def _busy_machines_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run beside these, and nobody reads their times."""
    monkeypatch.setattr(measure, "reasons_disturbed", lambda *_: [])


def measured(
    name: str, scale: Scale, model: Path, folder: Path
) -> tuple[Experiment, dict[str, Any], dict[str, Any]]:
    """An experiment of that name on BF16 and int8 servers, once; and what each arm's run gave."""
    geometry = read_model(model).geometry
    bench = Bench(model, geometry, scale, True, (), folder)
    plan = experiment(name, tuple(arms_named("bf16,int8")), scale, geometry, repeats=1)
    setup = {"model": model.name, "environment": environment.describe()}
    log = RunLog(folder / "runs.jsonl", setup)
    servers = [bench.server(plan, arm) for arm in plan.arms]
    with serving(*servers, timeout=300):
        urls = {server.name: server.url for server in servers}
        asyncio.run(
            run_all(bench, plan, urls, missing(plan, log), log, Progress(60.0, deadline=None))
        )
    assert missing(plan, log) == []
    stock, quantised = log.runs
    return plan, stock, quantised


def test_arms_take_turns_on_servers_that_do_what_their_layout_says(
    quick_model: Path, tmp_path: Path
) -> None:
    plan, stock, quantised = measured("sweep", SMALL, quick_model, tmp_path)
    (point,) = plan.points
    for run in (stock, quantised):
        assert run["invalid"] == []
        assert len(run["requests"]) == point.requests
        assert all(request["ttft_ms"] > 0 for request in run["requests"])
        # An arm's time is its turns', not the others'.
        assert 0 < run["seconds"] < run["ended"] - run["started"]
    assert stock["started"] == quantised["started"]
    assert stock["seconds"] + quantised["seconds"] < stock["ended"] - stock["started"]
    # The prefixes fit INT8's L2 and not BF16's.
    hits = [
        sum(request["device"] + request["host"] for request in run["requests"])
        for run in (stock, quantised)
    ]
    assert hits[0] < hits[1] == point.requests * point.prefix


def test_on_the_same_disk_int8_keeps_prefixes_that_bf16_has_lost(
    model: Path, tmp_path: Path
) -> None:
    small = replace(CPU, l1_tokens=512, shards=Shards(64), concurrency=1, output=1)
    _, stock, quantised = measured("l3", small, model, tmp_path)
    # Capacities, pages on disk and bytes per token are those of each layout.
    assert (stock["invalid"], quantised["invalid"]) == ([], [])
    disks = [run["disk"] for run in (stock, quantised)]
    # Both are full: nearly twice the pages in the same bytes.
    for disk in disks:
        assert disk["held_files"] == disk["cap_bytes"] // disk["page_bytes"]
    assert 1.9 < disks[1]["held_files"] / disks[0]["held_files"] < 2
    fetched = [sum(request["storage"] for request in run["requests"]) for run in (stock, quantised)]
    assert 0 < fetched[0] < fetched[1]
