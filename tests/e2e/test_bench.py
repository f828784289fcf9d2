"""A bench's runs on real servers: what is filled, whose turn it is, what is counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from bench.lab import environment
from bench.lab.arms import arms_named
from bench.lab.servers import serving
from bench.lab.shards import Shards
from bench.tiers import measure
from bench.tiers.measure import Bench, missing, run_all
from bench.tiers.plan import CPU, experiment
from bench.tiers.progress import Progress
from bench.tiers.runs import RunLog
from hiqcache.model import read_model

pytestmark = pytest.mark.e2e

SMALL = replace(CPU, shares=(), prefixes=(256,), requests=24)


@pytest.fixture(autouse=True)
def _busy_machines_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests run beside these, and nobody reads their times."""
    monkeypatch.setattr(measure, "reasons_disturbed", lambda *_: [])


def test_arms_take_turns_on_servers_that_do_what_their_layout_says(
    quick_model: Path, tmp_path: Path
) -> None:
    geometry = read_model(quick_model).geometry
    bench = Bench(quick_model, geometry, SMALL, True, (), tmp_path)
    plan = experiment("sweep", tuple(arms_named("bf16,int8")), SMALL, geometry, repeats=1)
    (point,) = plan.points
    setup = {"model": quick_model.name, "environment": environment.describe()}
    log = RunLog(tmp_path / "runs.jsonl", setup)
    servers = [bench.server(plan, arm) for arm in plan.arms]
    with serving(*servers, timeout=300):
        urls = {server.name: server.url for server in servers}
        asyncio.run(
            run_all(bench, plan, urls, missing(plan, log), log, Progress(60.0, deadline=None))
        )
    stock, quantised = log.runs
    assert missing(plan, log) == []
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
    geometry = read_model(model).geometry
    bench = Bench(model, geometry, small, True, (), tmp_path)
    plan = experiment("l3", tuple(arms_named("bf16,int8")), small, geometry, repeats=1)
    setup = {"model": model.name, "environment": environment.describe()}
    log = RunLog(tmp_path / "runs.jsonl", setup)
    servers = [bench.server(plan, arm) for arm in plan.arms]
    with serving(*servers, timeout=300):
        urls = {server.name: server.url for server in servers}
        asyncio.run(
            run_all(bench, plan, urls, missing(plan, log), log, Progress(60.0, deadline=None))
        )
    stock, quantised = log.runs
    # Capacities, pages on disk and bytes per token are those of each layout.
    assert (stock["invalid"], quantised["invalid"]) == ([], [])
    disks = [run["disk"] for run in (stock, quantised)]
    # Both are full: nearly twice the pages in the same bytes.
    for disk in disks:
        assert disk["held_files"] == disk["cap_bytes"] // disk["page_bytes"]
    assert 1.9 < disks[1]["held_files"] / disks[0]["held_files"] < 2
    fetched = [sum(request["storage"] for request in run["requests"]) for run in (stock, quantised)]
    assert 0 < fetched[0] < fetched[1]
