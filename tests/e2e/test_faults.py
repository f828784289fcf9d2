"""Faults amid load, on one server of a tiny model: what is lost is cache, and it is said.

In order: a soak; clients that hang up by the hundred; the scheduler killed amid transfers; the
server itself killed. After each the prompts' answers are compared with the references that were
taken at the start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from bench.lab.arms import arm_named
from bench.lab.hang_up import hang_up
from bench.lab.server_metrics import scrape
from bench.soak.server import Load, ServerSoak
from bench.verify.answers import distance
from hiqcache import direct_http

pytestmark = pytest.mark.e2e

LOAD = Load(prompts=40, l1_tokens=1024, groups=8, short=48, long=320, suffix=24)
PAGE = 16


@pytest.fixture(scope="module")
def soak() -> Iterator[ServerSoak]:
    found = ServerSoak(
        arm_named("int8"), seed=1, checksum=True, cpu=True, concurrency=4, page_size=PAGE, load=LOAD
    )
    yield found
    found.close()


def asked_again(soak: ServerSoak) -> list[int]:
    """Every prompt again, one after the other: each is right. Tokens that came from L2 for each."""
    replies = [soak._ask(prompt) for prompt in soak._texts]
    for reply, reference in zip(replies, soak._references, strict=True):
        assert distance(reply, reference) <= soak.bound
    return [reply.host for reply in replies]


def flush(soak: ServerSoak) -> None:
    """Empty both tiers; SGLang does so once nothing runs and no transfer is on its way."""
    direct_http.post(f"{soak.server.url}/flush_cache?timeout=60", timeout=90)


def test_a_soak_of_everything_at_once(soak: ServerSoak) -> None:
    soak.run(60)
    while not (soak.counts["hung_up"] and soak.counts["aborted"] and soak.counts["long_answers"]):
        soak.run(10)
    assert soak.faults == []
    assert soak.counts["checked_restores"] >= 60
    assert soak.counts["checksum_records"] > 0
    assert soak.counts["checksum_mismatches"] == soak.counts["mismatches"] == 0


def test_another_prompt_s_answer_would_be_a_fault(soak: ServerSoak) -> None:
    kept = soak._references[0]
    soak._references[0] = soak._references[1]
    soak._check(0)
    soak._references[0] = kept
    (fault,) = soak.faults
    assert fault["change"] > fault["bound"]
    soak.faults.clear()


def test_clients_that_hang_up_by_the_hundred_leave_nothing(soak: ServerSoak) -> None:
    url = soak.server.url
    with ThreadPoolExecutor(16) as pool:
        prompts = [soak._texts[number % len(soak._texts)] for number in range(200)]
        hung_up = list(pool.map(lambda prompt: hang_up(url, prompt, 200), prompts))
    assert sum(hung_up) >= 190
    # Far fewer seconds than 200 answers of 200 tokens would take: they were not finished.
    flush(soak)
    found = scrape(soak.server)
    assert found["sglang:num_running_reqs"] == 0
    assert found["hiqcache_l2_used_tokens"] == 0, "slots of L2 are lost"
    assert asked_again(soak)[0] == 0, "a flush leaves nothing"
    assert sum(host > 0 for host in asked_again(soak)) > len(soak._texts) // 2
    assert scrape(soak.server)["hiqcache_checksum_mismatches_total"] == 0


def scheduler_of(soak: ServerSoak) -> psutil.Process:
    assert soak.server.process is not None
    (found,) = [
        child
        for child in psutil.Process(soak.server.process.pid).children(recursive=True)
        if any("scheduler" in part for part in [child.name(), *child.cmdline()])
    ]
    return found


@pytest.mark.parametrize("victim", ["scheduler", "server"])
def test_a_process_killed_amid_transfers_ends_all_and_loses_cache_alone(
    soak: ServerSoak, victim: str
) -> None:
    server = soak.server
    assert server.process is not None
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert family, "the server should have children"
    pid = scheduler_of(soak).pid if victim == "scheduler" else server.process.pid
    before = scrape(server)
    failed = threading.Event()

    def ask_on(number: int) -> None:
        # Prompts by turns: with L1 as small as it is, most of them are restored.
        while True:
            number += 1
            try:
                soak._ask(soak._texts[number % len(soak._texts)])
            except OSError:
                failed.set()
                return

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask_on, 10 * number) for number in range(4)]
        while scrape(server)["hiqcache_restore_tokens_total"] == before[
            "hiqcache_restore_tokens_total"
        ]:  # fmt: skip
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        # Clients are told: none of them waits for an answer that will not come.
        assert failed.wait(60)
        server.process.wait(60)
        for task in asking:
            task.result(60)
    gone, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, "processes that hold memory outlive the server"
    assert len(gone) == len(family)
    if victim == "server":
        with pytest.raises(ProcessLookupError):
            os.killpg(server.process.pid, 0)
    if victim == "scheduler":
        assert "killed" in server.log.read_text().lower() or server.process.returncode != 0
    server.start()
    server.wait(300)
    after = scrape(server)
    assert after["hiqcache_l2_used_tokens"] == 0
    assert after["hiqcache_restore_tokens_total"] == 0
    assert asked_again(soak)[0] == 0, "L2 is memory: nothing of it outlives the process"
    assert any(asked_again(soak)), "nothing is restored after a restart"
    with contextlib.suppress(OSError):
        flush(soak)


def test_int4_is_judged_by_whole_pages() -> None:
    found = ServerSoak(
        arm_named("int4"), seed=1, checksum=True, cpu=True, concurrency=4, page_size=64, load=LOAD
    )
    try:
        found.run(60)
        assert found.faults == []
        assert found.counts["checked_restores"] >= 60
        # Half of the replacements lie above their median, and so above half of it.
        assert found.counts["replaced_seen"] > found.counts["replaced"] / 2
        short, long = (pick(range(len(found._texts)), key=lambda n: len(found._texts[n]))
                       for pick in (min, max))  # fmt: skip
        found._references[short] = found._references[long]
        found._check(short)
        (fault,) = found.faults
        assert fault["change"] > found.bound
    finally:
        found.close()
