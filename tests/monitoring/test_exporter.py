"""The comparison exporter, scraping pages over HTTP."""

from __future__ import annotations

import argparse
import json
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from wsgiref.simple_server import make_server

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from hiqcache import exporter
from hiqcache.exporter import Arm, Comparison, application, read_page
from loadtest.servers import free_port

PAGE = """\
# HELP hiqcache_l2_capacity_tokens Tokens.
# TYPE hiqcache_l2_capacity_tokens gauge
hiqcache_l2_capacity_tokens{{codec="x",pool="kv",tp_rank="0"}} {capacity}
hiqcache_l2_bytes_per_token{{codec="x",pool="kv",tp_rank="0"}} {bytes}
sglang:prefill_effective_tokens_total{{mode="device_hit",tp_rank="0"}} {device}
sglang:prefill_effective_tokens_total{{mode="host_hit",tp_rank="0"}} {host}
sglang:prefill_effective_tokens_total{{mode="input",tp_rank="0"}} {input}
hiqcache_restore_seconds_bucket{{codec="x",le="+Inf"}} 3
hiqcache_restore_seconds_sum{{codec="x"}} {seconds}
hiqcache_restore_tokens_total{{codec="x"}} {tokens}
sglang:unrelated{{text="a b \\" c"}} 7
"""


def text(**values: float) -> str:
    """A server's page; what is not named is 0."""
    names = ("capacity", "bytes", "device", "host", "input", "seconds", "tokens")
    return PAGE.format(**{name: values.get(name, 0.0) for name in names})


class Page:
    """A server whose /metrics is ``text``; 500 while that is None."""

    def __init__(self, content: str | None) -> None:
        self.content = content

    @contextmanager
    def serve(self) -> Iterator[str]:
        page = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200 if page.content is not None else 500)
                self.end_headers()
                self.wfile.write((page.content or "").encode())

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/metrics"
        finally:
            server.shutdown()
            server.server_close()


def shown(comparison: Comparison) -> dict[str, float]:
    """The exporter's samples; an arm's by name and arm."""
    values = {}
    for family in comparison.collect():
        for sample in family.samples:
            arm = sample.labels.get("arm")
            values[f"{sample.name}[{arm}]" if arm else sample.name] = sample.value
    return values


def compared(first: tuple[str, str], last: tuple[str, str]) -> dict[str, float]:
    """What is shown after two scrapes of (control, treatment)."""
    pages = [Page(first[0]), Page(first[1])]
    with pages[0].serve() as control, pages[1].serve() as treatment:
        arms = [Arm("bf16", control, 300), Arm("int8", treatment, 300)]
        for arm in arms:
            arm.fetch(5)
        for page, content in zip(pages, last, strict=True):
            page.content = content
        for arm in arms:
            arm.fetch(5)
        return shown(Comparison(*arms))


def test_gains_are_of_what_happened_between_scrapes() -> None:
    values = compared(
        (
            text(capacity=1000, bytes=200, input=5000),
            text(capacity=1900, bytes=105, device=900, input=100),
        ),
        (
            text(capacity=1000, bytes=200, input=5800, host=200, seconds=1.0, tokens=200),
            text(
                capacity=1900, bytes=105, device=900, host=700, input=400, seconds=2.8, tokens=700
            ),
        ),
    )
    assert values["hiqcache_arm_up[bf16]"] == values["hiqcache_arm_up[int8]"] == 1
    assert values["hiqcache_arm_hit_ratio[bf16]"] == pytest.approx(0.2)
    assert values["hiqcache_arm_hit_ratio[int8]"] == pytest.approx(0.7)
    assert values["hiqcache_hit_ratio_gain"] == pytest.approx(0.5)
    assert values["hiqcache_capacity_ratio"] == pytest.approx(1.9)
    assert values["hiqcache_density_ratio"] == pytest.approx(200 / 105)
    assert values["hiqcache_restore_time_ratio"] == pytest.approx(0.8)
    assert "hiqcache_backup_time_ratio" not in values


def test_arms_without_traffic_show_capacity_and_no_ratio_of_nothing() -> None:
    idle = (text(capacity=1000, bytes=200), text(capacity=1900, bytes=105))
    values = compared(idle, idle)
    assert values["hiqcache_capacity_ratio"] == pytest.approx(1.9)
    assert "hiqcache_hit_ratio_gain" not in values
    assert "hiqcache_restore_time_ratio" not in values


def test_an_arm_that_is_down_is_a_metric() -> None:
    page = Page(text(capacity=1000, bytes=200))
    with page.serve() as url:
        arms = Arm("bf16", url, 300), Arm("int8", f"http://127.0.0.1:{free_port()}/", 300)
        for arm in arms:
            arm.fetch(2)
        values = shown(Comparison(*arms))
        assert values["hiqcache_arm_up[bf16]"] == 1
        assert values["hiqcache_arm_up[int8]"] == 0
        assert values["hiqcache_arm_scrape_failures_total[int8]"] == 1
        assert "hiqcache_capacity_ratio" not in values
        page.content = None
        arms[0].fetch(2)
        assert shown(Comparison(*arms))["hiqcache_arm_up[bf16]"] == 0


def test_a_page_that_is_no_metrics_page_is_a_failure() -> None:
    with Page("hiqcache_l2_capacity_tokens{ this is not a metric").serve() as url:
        arm = Arm("bf16", url, 300)
        arm.fetch(5)
    assert not arm.up
    assert arm.failures == 1


def test_a_restart_begins_a_new_window() -> None:
    arm = Arm("int8", "", 300)
    for at, host in enumerate((1000, 2000, 5, 15)):
        arm.take(read_page(text(host=host, input=2 * host), float(at)))
    assert arm.growth("sglang:prefill_effective_tokens_total", "host_hit") == 10
    assert arm.hit_ratio() == pytest.approx(1 / 3)


def test_the_window_forgets_what_is_older() -> None:
    arm = Arm("int8", "", 10)
    for at in range(0, 100, 5):
        arm.take(read_page(text(host=at), float(at)))
    assert arm.growth("sglang:prefill_effective_tokens_total", "host_hit") == 10


def test_ranks_are_added_up() -> None:
    two = text(capacity=10) + 'hiqcache_l2_capacity_tokens{tp_rank="1"} 10\n'
    assert read_page(two, 0.0).gauges["hiqcache_l2_capacity_tokens"] == 20


def test_metrics_healthz_and_nothing_else() -> None:
    comparison = Comparison(Arm("bf16", "", 300), Arm("int8", "", 300))
    server = make_server("127.0.0.1", 0, application(comparison))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    try:
        with urllib.request.urlopen(f"{base}/healthz") as answer:
            assert json.load(answer) == {"status": "ok", "arms": {"bf16": False, "int8": False}}
        with urllib.request.urlopen(f"{base}/metrics") as answer:
            assert b'hiqcache_arm_up{arm="bf16"} 0.0' in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{base}/")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--control", "nonsense"], "--control nonsense: give a name and an address"),
        (["--control", "a=http://x", "--treatment", "a=http://y"], "both called a"),
        (["--interval", "0"], "must be positive"),
        (["--interval", "400"], "shorter than the window"),
    ],
)
def test_bad_arguments_say_what_to_do(flags: list[str], complaint: str) -> None:
    parser = argparse.ArgumentParser()
    exporter.add_arguments(parser)
    with pytest.raises(ValueError, match=complaint):
        exporter.run(parser.parse_args(flags))


@pytest.mark.monitoring
def test_promtool_accepts_the_page() -> None:
    registry = CollectorRegistry()
    arms = Arm("bf16", "", 300), Arm("int8", "", 300)
    for arm in arms:
        arm.up = True
        arm.take(read_page(text(capacity=10, bytes=2), 0.0))
        arm.take(read_page(text(capacity=10, bytes=2, host=4, input=4, seconds=1, tokens=2), 1.0))
    registry.register(Comparison(*arms))
    page = generate_latest(registry)
    assert b"hiqcache_restore_time_ratio" in page
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
