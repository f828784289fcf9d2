"""The canary against real servers: a copy reads exactly zero, INT8 does not; L2 keeps its room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from bench.lab.servers import Server
from hiqcache.canary.command import follow, summary
from hiqcache.canary.metrics import CanaryMetrics
from hiqcache.canary.prompts import texts
from hiqcache.canary.server import Client
from hiqcache.canary.watch import Plan, Watch
from tests.e2e.conftest import L1_TOKENS, MakeServer

pytestmark = pytest.mark.e2e

PREFIX, SCORED = 64, 16
#: L2 holds 3,073 tokens of BF16 here, and pushing takes L1's 1,024 of them.
PLAN = Plan(0.6, PREFIX, SCORED, push_per_hour=10**6, slo=0.01, texts=texts(None))

MakeWatch = Callable[..., Watch]


@pytest.fixture(scope="module", params=["bf16", "int8"])
def server(request: pytest.FixtureRequest, make_server: MakeServer) -> Iterator[Server]:
    # Pages that the scored tokens do not fill.
    with make_server(request.param, "--page-size", "32", name="canary") as found:
        found.wait()
        yield found


@pytest.fixture
def watch(server: Server) -> MakeWatch:
    families = CanaryMetrics(CollectorRegistry())

    def make(plan: Plan = PLAN) -> Watch:
        return Watch(server.name.split()[0], Client(server.url), plan, families)

    return make


def visit_until(watch: Watch, comparisons: int) -> None:
    follow(watch, 0.0, comparisons, threading.Event())


def test_a_copy_reads_exactly_zero_and_int8_does_not(watch: MakeWatch, server: Server) -> None:
    before = Client(server.url).tiers()
    canary = watch()
    visit_until(canary, 12)
    found = summary(canary)
    assert found["restored"] == 12
    assert found["scored_tokens"] == 12 * SCORED
    if canary.arm == "bf16":
        assert found["identical"] == 12
        assert found["kl_nats_max"] == 0.0
        assert found["top1_agreement"] == 1.0
    else:
        assert found["identical"] < 12
        # Far from another prompt's answer: that would be nats.
        assert 0.0 < found["kl_nats_mean"] < 0.05
        assert found["top1_agreement"] > 0.9
    # Nobody else stored anything, so all that came to L2 was the canary's.
    after = canary.client.tiers()
    assert before.stored < after.stored
    assert after.stored - before.stored <= PLAN.share * after.l2
    assert after.stored - before.stored <= canary.budget.taken(after)


def test_without_load_and_without_pushing_it_waits(watch: MakeWatch) -> None:
    canary = watch(replace(PLAN, share=0.1, push_per_hour=0))
    while canary.visit():
        pass
    count = len(canary.probes)
    assert 0 < count <= 0.1 * canary.client.tiers().l2 / (PREFIX + SCORED)
    assert all(probe.reference for probe in canary.probes)
    stored = canary.client.tiers().stored
    assert not any(canary.visit() for _ in range(5))
    assert canary.client.tiers().stored == stored
    assert canary.comparisons == []

    # Others' load: half of L1 is not enough to have pushed the prompts out, twice as much is.
    others = list(range(1000, 1256))
    for number in range(L1_TOKENS // 512):
        canary.client.fill(others, f"other-{number}")
    assert not canary.visit()
    for number in range(2, 2 + 2 * L1_TOKENS // 256):
        canary.client.fill(others, f"other-{number}")
    visit_until(canary, count)
    assert {one.prompt for one in canary.comparisons} == {p.prompt.name for p in canary.probes}


def test_a_wrong_restore_would_be_seen(watch: MakeWatch) -> None:
    canary = watch()
    while not any(probe.reference for probe in canary.probes):
        canary.visit()
    probe = canary.probes[0]
    assert probe.reference is not None
    # As if rows of one position had come back for another: it is another position's answer then.
    probe.reference = probe.reference[1:] + probe.reference[:1]
    visit_until(canary, 1)
    (found,) = canary.comparisons
    assert not found.identical
    assert sum(found.divergences) / SCORED > 0.5
    assert found.agreeing < SCORED


def test_a_share_that_holds_no_prompt_says_what_to_do(
    watch: MakeWatch, caplog: pytest.LogCaptureFixture
) -> None:
    canary = watch(replace(PLAN, share=0.01, push_per_hour=0))
    assert not canary.visit()
    assert "holds no prompt of 80: raise --l2-share, lower --prefix-tokens." in caplog.text


def test_a_server_that_is_away_is_noted_and_met_again(watch: MakeWatch, server: Server) -> None:
    canary = watch(replace(PLAN, share=0.1, push_per_hour=0))
    assert canary.visit()
    canary.client.url = "http://127.0.0.1:9"
    assert not canary.visit()
    canary.client.url = server.url
    assert canary.visit()
