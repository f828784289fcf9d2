"""The whole stack on loopback: real servers, Prometheus, exporter, load.

Every panel's and every rule's query is asked of Prometheus, of a stack that just started and then
under a load; chosen values are compared with the servers' own counters; then one arm is killed, and
comes back with storage (L3).
"""

from __future__ import annotations

import dataclasses
import math
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hiqcache import direct_http
from monitoring.dashboards import dashboards
from monitoring.panel_queries import filled, panel_queries
from monitoring.stack import Stack, stack
from tests.monitoring.test_rules import ALERTS, RECORDS

pytestmark = [pytest.mark.monitoring, pytest.mark.e2e]

LOAD_SECONDS = 75
SCRAPE_SECONDS = 5

QUERIES = [
    (f"{uid}: {query.panel['title']} {query.ref}", query)
    for uid, board in dashboards().items()
    for query in panel_queries(board)
]

#: What a stack without any load has nothing to say about. These panels say so in their own words.
NEEDS_LOAD = {
    "hiqcache-ab: TTFT gain A",
    "hiqcache-ab: Throughput gain A",
    "hiqcache-ab: Restore time per token A",
    # Nothing has left L1 yet, so the canary has compared nothing.
    *(f"hiqcache-l2: Canary: KL per token {ref}" for ref in "AB"),
    "hiqcache-l2: Canary: askings B",
    "hiqcache-load: Requests in 5 minutes A",
    "hiqcache-load: Failed A",
    "hiqcache-load: Requests A",
    "hiqcache-load: Failures A",
    "hiqcache-load: Tokens A",
    "hiqcache-load: Tokens B",
    *(
        f"hiqcache-load: {title} {ref}"
        for title in (
            "Time to first token (TTFT)",
            "Time per output token (TPOT)",
            "Inter-token latency (ITL)",
            "End to end",
        )
        for ref in "AB"
    ),
}

#: What servers without storage, as those of the stack are, have nothing to say about.
NEEDS_STORAGE = {
    f"hiqcache-l2: {title} {ref}"
    for title in ("Storage (L3)", "Corrupt pages and failed batches")
    for ref in "AB"
}


class Seen:
    """What the one run of the stack showed."""

    def __init__(self) -> None:
        self.fresh: dict[str, int] = {}
        self.loaded: dict[str, list[dict[str, Any]]] = {}
        self.pages: dict[str, dict[str, float]] = {}
        self.load_seconds = (0.0, 0.0)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack")) as started:
        yield started


@pytest.fixture(scope="module")
def seen(running: Stack) -> Seen:
    """A fresh stack asked every query, a load, and every query again."""
    seen = Seen()
    time.sleep(4 * SCRAPE_SECONDS)
    for name, query in QUERIES:
        seen.fresh[name] = len(running.query(query.expression))
    start = time.time()
    with running.load(4 * LOAD_SECONDS) as load:
        assert load.process is not None
        # Locust's metrics end with it, so the last scrape comes while it runs. On a busy machine
        # it takes the canary longer to find a prefix in L2.
        while load.process.poll() is None and (
            time.time() < start + LOAD_SECONDS
            or (not canary_compared(running) and time.time() < start + 3 * LOAD_SECONDS)
        ):
            time.sleep(1)
        assert load.process.poll() is None, load.log.read_text()[-3000:]
        seen.load_seconds = (start, time.time())
        for name, query in QUERIES:
            seen.loaded[name] = running.query_range(
                query.expression, start, time.time(), SCRAPE_SECONDS
            )
    time.sleep(3 * SCRAPE_SECONDS)
    seen.pages = {arm: page(server.url) for arm, server in running.servers.items()}
    return seen


def canary_compared(running: Stack) -> bool:
    """Whether the canary has seen a prefix restored on each arm."""
    return len(running.query("hiqcache_canary_restored_total > 0")) == len(running.servers)


def page(url: str) -> dict[str, float]:
    """A server's own metrics; series of one name are added up, labels that matter kept in it."""
    values: dict[str, float] = {}
    text = direct_http.get(f"{url}/metrics").text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            kept = [
                sample.labels[label] for label in ("mode", "cache_source") if label in sample.labels
            ]
            name = ":".join([sample.name, *kept])
            values[name] = values.get(name, 0.0) + sample.value
    return values


@pytest.mark.parametrize("name", [name for name, _ in QUERIES])
def test_a_stack_that_just_started_has_no_empty_panel(seen: Seen, name: str) -> None:
    (query,) = [query for known, query in QUERIES if known == name]
    if name in NEEDS_LOAD | NEEDS_STORAGE:
        assert query.panel["fieldConfig"]["defaults"]["noValue"].startswith(("no ", "none "))
    else:
        assert seen.fresh[name] > 0


@pytest.mark.parametrize("name", [name for name, _ in QUERIES if name not in NEEDS_STORAGE])
def test_every_panel_shows_data_under_load(seen: Seen, name: str) -> None:
    values = [float(v) for series in seen.loaded[name] for _, v in series["values"]]
    assert any(math.isfinite(value) for value in values)


@pytest.mark.parametrize("record", RECORDS)
def test_every_recording_rule_has_data_of_both_arms(
    seen: Seen, running: Stack, record: str
) -> None:
    start, end = seen.load_seconds
    series = running.query_range(record, start, end, SCRAPE_SECONDS)
    arms = {
        one["metric"].get("arm")
        for one in series
        if any(math.isfinite(float(value)) for _, value in one["values"])
    }
    # A comparison of the arms is of neither.
    assert arms == ({None} if record.startswith("model:") else {"bf16", "int8"})


@pytest.mark.usefixtures("seen")
def test_prometheus_evaluates_every_rule_without_error(running: Stack) -> None:
    rules = running.rules()
    assert {rule["name"] for rule in rules} == {*RECORDS, *ALERTS}
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}


@pytest.mark.usefixtures("seen")
@pytest.mark.parametrize("uid", sorted(dashboards()))
def test_every_variable_has_choices(running: Stack, uid: str) -> None:
    for variable in dashboards()[uid]["templating"]["list"]:
        if variable["type"] != "query":
            continue
        metric, label = variable["query"]["query"].removeprefix("label_values(")[:-1].split(", ")
        asked = urlencode({"match[]": filled(metric)})
        answer = direct_http.get(f"{running.prometheus}/api/v1/label/{label}/values?{asked}")
        assert answer.json()["data"], variable["name"]


def test_load_annotations_mark_the_load(seen: Seen, running: Stack) -> None:
    (annotation,) = dashboards()["hiqcache-ab"]["annotations"]["list"]
    start, end = seen.load_seconds
    (series,) = running.query_range(annotation["target"]["expr"], start, end, SCRAPE_SECONDS)
    assert series["metric"] == {"workload": "shared-prefix"}
    assert len(series["values"]) * SCRAPE_SECONDS > 0.6 * LOAD_SECONDS


@pytest.mark.parametrize("arm", ["bf16", "int8"])
@pytest.mark.usefixtures("seen")
def test_promtool_accepts_our_part_of_the_server_s_page(running: Stack, arm: str) -> None:
    text = direct_http.get(f"{running.servers[arm].url}/metrics").text
    ours = "".join(line + "\n" for line in text.splitlines() if "hiqcache_" in line)
    assert "# HELP hiqcache_restore_seconds" in ours
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=ours, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("arm", ["bf16", "int8"])
def test_pool_metrics_agree_with_sglang_s_own_counters(seen: Seen, arm: str) -> None:
    own = seen.pages[arm]
    assert own["hiqcache_l2_capacity_tokens"] == own["sglang:hicache_host_total_tokens"]
    assert own["hiqcache_backup_tokens_total"] == own["sglang:hicache_backup_tokens_total"]
    assert own["hiqcache_backup_bytes_total"] == own["sglang:hicache_backup_bytes_total"]
    assert own["hiqcache_restore_tokens_total"] == own["sglang:load_back_tokens_total"]
    assert own["hiqcache_restore_bytes_total"] == own["sglang:load_back_bytes_total"]
    # Nothing was flushed and no backup failed, so what came in and is no longer there was evicted.
    gone = own["hiqcache_backup_tokens_total"] - own["hiqcache_l2_used_tokens"]
    assert own["hiqcache_l2_evicted_tokens_total"] == gone
    assert own["hiqcache_codec_excess_rows_total"] == 0


@pytest.mark.parametrize("arm", ["bf16", "int8"])
def test_prometheus_agrees_with_the_servers(seen: Seen, running: Stack, arm: str) -> None:
    own = seen.pages[arm]
    for name in (
        "hiqcache_l2_capacity_tokens",
        "hiqcache_l2_used_tokens",
        "hiqcache_l2_evicted_tokens_total",
        "hiqcache_restore_tokens_total",
        "hiqcache_restore_seconds_count",
    ):
        assert running.value(f'sum({name}{{arm="{arm}"}})') == own[name], name
    prefix = "sglang:prefill_effective_tokens_total"
    served = sum(own[f"{prefix}:{mode}"] for mode in ("device_hit", "host_hit", "input"))
    hits = own[f"{prefix}:device_hit"] + own[f"{prefix}:host_hit"]
    # The recorded ratio, weighted over the load, is the counters' ratio up to the window's edges.
    start, end = seen.load_seconds
    rates = f'arm_model_mode:prompt_tokens:rate2m{{arm="{arm}"'
    weighted = running.value(
        f'sum(sum_over_time({rates}, mode=~".*_hit"}}[{end - start:.0f}s] @ {end:.0f}))'
        f" / sum(sum_over_time({rates}}}[{end - start:.0f}s] @ {end:.0f}))"
    )
    assert weighted == pytest.approx(hits / served, abs=0.15)


def test_int8_holds_more_and_hits_more(seen: Seen, running: Stack) -> None:
    ratio = (
        seen.pages["int8"]["hiqcache_l2_capacity_tokens"]
        / seen.pages["bf16"]["hiqcache_l2_capacity_tokens"]
    )
    assert ratio > 1.9
    assert running.value("hiqcache_capacity_ratio") == pytest.approx(ratio)
    hits = "sglang:prefill_effective_tokens_total:host_hit"
    assert seen.pages["int8"][hits] > seen.pages["bf16"][hits] > 0
    evicted = "hiqcache_l2_evicted_tokens_total"
    assert seen.pages["int8"][evicted] < seen.pages["bf16"][evicted]


@pytest.mark.parametrize("arm", ["bf16", "int8"])
@pytest.mark.usefixtures("seen")
def test_the_canary_compares_under_load(running: Stack, arm: str) -> None:
    page = direct_http.get(f"{running.canary}/metrics").text
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=page, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert running.value(f'sum(hiqcache_canary_restored_total{{arm="{arm}"}})') > 0
    different = running.value(f'sum(hiqcache_canary_different_total{{arm="{arm}"}})')
    diverging = running.value(f'sum(hiqcache_canary_kl_nats_sum{{arm="{arm}"}})')
    assert (different == 0) == (diverging == 0) == (arm == "bf16")
    taken = running.value(f'max(hiqcache_canary_l2_tokens{{arm="{arm}"}})')
    assert 0 < taken <= 0.1 * running.value(f'max(hiqcache_l2_capacity_tokens{{arm="{arm}"}})')


def test_the_load_generator_counts_what_the_servers_served(seen: Seen, running: Stack) -> None:
    start, end = seen.load_seconds
    for arm in ("bf16", "int8"):
        sent = running.value(
            f'sum(max_over_time(hiqcache_load_requests_total{{arm="{arm}"}}'
            f"[{end - start:.0f}s] @ {end:.0f}))"
        )
        assert 0 < sent <= seen.pages[arm]["sglang:num_requests_total"]


@pytest.mark.usefixtures("seen")
def test_prometheus_and_the_exporter_killed_and_back(running: Stack) -> None:
    """Of what they watch nothing is lost: servers count on, and what was scraped lies on disk."""
    restored = "hiqcache_restore_tokens_total"
    before, then = running.value(f"sum({restored})"), time.time()
    assert before > 0
    for name, ready in (("prometheus", "/-/ready"), ("exporter", "/healthz")):
        process = running.processes[name]
        assert process.process is not None
        process.process.kill()
        process.process.wait()
        assert not direct_http.answers(getattr(running, name) + ready, timeout=5)
    for name, ready in (("prometheus", "/-/ready"), ("exporter", "/healthz")):
        running.processes[name].__enter__()
        running.processes[name].wait_for(getattr(running, name) + ready)
    deadline = time.monotonic() + 60
    while not running.query('min_over_time(up{job="exporter"}[10s]) == 1'):
        assert time.monotonic() < deadline, "the exporter is not scraped again"
        time.sleep(1)
    assert running.value(f"sum({restored} @ {then:.0f})") == before, "what was on disk is gone"
    assert running.value(f"sum({restored})") >= before
    assert running.value('hiqcache_arm_up{arm="int8"}') == 1
    assert running.query('ALERTS{alertstate="firing"}') == []


@pytest.mark.usefixtures("seen")
def test_an_arm_that_is_killed_raises_its_alert_and_is_a_metric(running: Stack) -> None:
    running.servers["int8"].stop()
    deadline = time.monotonic() + 90
    firing: list[dict[str, Any]] = []
    while not firing and time.monotonic() < deadline:
        time.sleep(SCRAPE_SECONDS)
        firing = [
            alert
            for rule in running.rules()
            if rule["name"] == "HiQCacheArmDown"
            for alert in rule["alerts"]
            if alert["state"] == "firing"
        ]
    (alert,) = firing
    assert alert["labels"]["arm"] == "int8"
    assert "docker compose logs sglang-int8" in alert["annotations"]["description"]
    assert running.value('hiqcache_arm_up{arm="int8"}') == 0
    assert running.value('hiqcache_arm_up{arm="bf16"}') == 1
    healthz = direct_http.get(f"{running.exporter}/healthz")
    assert healthz.json()["arms"] == {"bf16": True, "int8": False}


@pytest.mark.usefixtures("seen")
def test_an_arm_that_comes_back_with_storage_fills_its_panels(
    running: Stack, tmp_path: Path
) -> None:
    """Last in this file: the arm that the test before killed starts anew."""
    killed = running.servers["int8"]
    killed.stop()
    start = time.time()
    with dataclasses.replace(
        killed,
        log=killed.log.with_name("server-int8-l3.log"),
        args=(*killed.args, "--hicache-storage-backend", "file"),
        env={**killed.env, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(tmp_path)},
    ) as server:
        server.wait()
        with running.load(4 * SCRAPE_SECONDS) as load:
            assert load.process is not None
            load.process.wait(120)
        time.sleep(2 * SCRAPE_SECONDS)
        assert running.value('sum(hiqcache_l3_written_bytes_total{arm="int8"})') > 0
        for name, query in QUERIES:
            if name not in NEEDS_STORAGE:
                continue
            series = running.query_range(query.expression, start, time.time(), SCRAPE_SECONDS)
            values = [float(value) for one in series for _, value in one["values"]]
            assert any(math.isfinite(value) for value in values), name
