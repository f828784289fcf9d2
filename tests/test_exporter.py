"""The comparison exporter, scraping pages over HTTP."""

from __future__ import annotations

import argparse
import logging
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bench.lab.servers import free_port
from hiqcache import direct_http, exporter
from hiqcache.exporter import Arm, Comparison, health, read_page
from hiqcache.metrics_page import serving

PAGE = """\
# HELP hiqcache_l2_capacity_tokens Tokens.
# TYPE hiqcache_l2_capacity_tokens gauge
hiqcache_l2_capacity_tokens{{codec="x",pool="kv",tp_rank="0"}} {capacity}
hiqcache_l2_bytes_per_token{{codec="x",pool="kv",tp_rank="0"}} {bytes}
hiqcache_restore_seconds_bucket{{codec="x",le="+Inf"}} 3
hiqcache_restore_seconds_sum{{codec="x"}} {seconds}
hiqcache_restore_tokens_total{{codec="x"}} {tokens}
sglang:unrelated{{text="a b \\" c"}} 7
"""


def text(**values: float) -> str:
    """A server's page; what is not named is 0."""
    names = ("capacity", "bytes", "seconds", "tokens")
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


def test_ratios_are_of_what_happened_between_scrapes() -> None:
    values = compared(
        (text(capacity=1000, bytes=200), text(capacity=1900, bytes=105, seconds=3, tokens=9)),
        (
            text(capacity=1000, bytes=200, seconds=1.0, tokens=200),
            text(capacity=1900, bytes=105, seconds=5.8, tokens=709),
        ),
    )
    assert values["hiqcache_arm_up[bf16]"] == values["hiqcache_arm_up[int8]"] == 1
    assert values["hiqcache_capacity_ratio"] == pytest.approx(1.9)
    assert values["hiqcache_density_ratio"] == pytest.approx(200 / 105)
    assert values["hiqcache_restore_time_ratio"] == pytest.approx(0.8)
    assert "hiqcache_backup_time_ratio" not in values


def test_arms_without_traffic_show_capacity_and_no_ratio_of_nothing() -> None:
    idle = (text(capacity=1000, bytes=200), text(capacity=1900, bytes=105))
    values = compared(idle, idle)
    assert values["hiqcache_capacity_ratio"] == pytest.approx(1.9)
    assert "hiqcache_restore_time_ratio" not in values


def test_hit_ratios_have_their_one_definition_in_the_recording_rules() -> None:
    page = text(capacity=1) + 'sglang:prefill_effective_tokens_total{mode="host_hit"} 5\n'
    values = compared((page, page), (page, page))
    assert [name for name in values if "hit" in name] == []


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


Behaviour = Callable[[socket.socket], None]


@contextmanager
def target(behave: Behaviour) -> Iterator[str]:
    """A server that reads a request and then does with the connection what ``behave`` does."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                try:
                    behave(connection)
                except OSError:
                    continue

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def sends(*parts: bytes, every: float = 0.0, times: int = 1) -> Behaviour:
    """Send ``parts`` one after the other, ``every`` so many seconds, the last one ``times``."""

    def behave(connection: socket.socket) -> None:
        for part in [*parts, *parts[-1:] * (times - 1)]:
            connection.sendall(part)
            time.sleep(every)

    return behave


def answer(body: str, headers: str = "") -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n{headers}\r\n{body}".encode()


GOOD = text(capacity=1000, bytes=200)

#: What a target may do in the place of answering, and what the log says of it.
MISBEHAVIOUR = {
    "closes": (sends(b""), "RemoteDisconnected"),
    "speaks another protocol": (sends(b"SSH-2.0-OpenSSH_9.2\r\n"), "BadStatusLine"),
    "stalls": (sends(b"", every=3), "no whole answer within 0.5 s"),
    "stalls amid headers": (sends(b"HTTP/1.1 200 OK\r\nX: ", b"x", every=0.1, times=30), "whole"),
    "drips": (sends(b"HTTP/1.1 200 OK\r\n\r\n", b"x", every=0.1, times=30), "no whole answer"),
    "breaks off": (sends(answer(GOOD)[:-40]), "it broke off"),
    "breaks off in chunks": (
        sends(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\nsglang:x 1\n"),
        "IncompleteRead",
    ),
    "never ends": (
        sends(b"HTTP/1.1 200 OK\r\n\r\n", b"sglang:x 1\n" * 100_000, times=1000),
        "more than 1,000,000 bytes",
    ),
    "announces too much": (
        sends(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n", b"a" * 2_000_000),
        "more than 1,000,000 bytes",
    ),
    "a header without end": (sends(b"HTTP/1.1 200 OK\r\n", b"a" * 70_000), "LineTooLong"),
    "headers without end": (sends(b"HTTP/1.1 200 OK\r\n", b"a: b\r\n", times=200), "headers"),
    "fails": (sends(b"HTTP/1.1 500 Oops\r\n\r\nwhy"), "status 500 Oops: why"),
    "sends elsewhere": (sends(b"HTTP/1.1 302 Found\r\nLocation: /\r\n\r\n"), "status 302"),
    "a web page": (sends(answer("<html><body>Welcome</body></html>")), "no metric of SGLang's"),
    "another program's metrics": (sends(answer("go_goroutines 7\n")), "no metric of SGLang's"),
    "nothing": (sends(answer("")), "no metric of SGLang's"),
    "no text": (sends(b"HTTP/1.1 200 OK\r\n\r\n\xff\xfe\x00"), "UnicodeDecodeError"),
    "no labels": (sends(answer("hiqcache_l2_capacity_tokens{ this is no metric")), "ValueError"),
    "no value": (sends(answer("hiqcache_l2_capacity_tokens")), "ValueError"),
    "no number": (sends(answer("hiqcache_l2_capacity_tokens{} many")), "ValueError"),
    "a backslash": (sends(answer('hiqcache_l2_capacity_tokens{a="\\')), "Error"),
}


@pytest.mark.parametrize("what", MISBEHAVIOUR)
def test_whatever_a_target_does_the_poller_lives_and_recovers(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter, "_PAGE_LIMIT", 1_000_000)
    behave, said = MISBEHAVIOUR[what]
    arm = Arm("int8", "", 300)
    other = Arm("bf16", "", 300)
    with target(sends(answer(GOOD))) as well, caplog.at_level(logging.WARNING):
        arm.url = well
        arm.fetch(5)
        assert arm.up
        with target(behave) as url:
            arm.url = url
            started = time.monotonic()
            arm.fetch(0.5)
            assert time.monotonic() - started < 2.5, "one bad target takes a whole round's time"
        assert shown(Comparison(other, arm))["hiqcache_arm_up[int8]"] == 0
        assert shown(Comparison(other, arm))["hiqcache_arm_scrape_failures_total[int8]"] == 1
        assert said in caplog.text
        arm.url = well
        arm.fetch(5)
    assert shown(Comparison(other, arm))["hiqcache_arm_up[int8]"] == 1
    assert arm.failures == 1


def test_an_arm_that_stalls_does_not_hold_up_the_other() -> None:
    stop = threading.Event()
    with target(sends(b"", every=30)) as stalling, target(sends(answer(GOOD))) as well:
        arms = [Arm("bf16", stalling, 300), Arm("int8", well, 300)]
        pollers = [threading.Thread(target=arm.poll, args=(0.3, stop)) for arm in arms]
        for poller in pollers:
            poller.start()
        until = time.monotonic() + 10
        while len(arms[1].readings) < 5 and time.monotonic() < until:
            time.sleep(0.05)
        stop.set()
        for poller in pollers:
            poller.join(5)
    assert len(arms[1].readings) >= 5
    assert not arms[0].up
    assert arms[0].failures >= 1


def test_a_restart_begins_a_new_window() -> None:
    arm = Arm("int8", "", 300)
    for at, tokens in enumerate((1000, 2000, 5, 15)):
        arm.take(read_page(text(tokens=tokens, seconds=2 * tokens), float(at)))
    assert arm.growth("hiqcache_restore_tokens_total") == 10
    assert arm.seconds_per_token("restore") == pytest.approx(2)


def test_the_window_forgets_what_is_older() -> None:
    arm = Arm("int8", "", 10)
    for at in range(0, 100, 5):
        arm.take(read_page(text(tokens=at), float(at)))
    assert arm.growth("hiqcache_restore_tokens_total") == 10


def test_ranks_are_added_up() -> None:
    two = text(capacity=10) + 'hiqcache_l2_capacity_tokens{tp_rank="1"} 10\n'
    assert read_page(two, 0.0).gauges["hiqcache_l2_capacity_tokens"] == 20


def test_metrics_healthz_and_nothing_else() -> None:
    arms = Arm("bf16", "", 300), Arm("int8", "", 300)
    registry = CollectorRegistry()
    registry.register(Comparison(*arms))
    with serving("127.0.0.1", 0, registry, lambda: health(*arms)) as port:
        base = f"http://127.0.0.1:{port}"
        healthz = direct_http.get(f"{base}/healthz").json()
        assert healthz == {"status": "ok", "arms": {"bf16": False, "int8": False}}
        assert 'hiqcache_arm_up{arm="bf16"} 0.0' in direct_http.get(f"{base}/metrics").text
        with pytest.raises(direct_http.HttpError, match="404"):
            direct_http.get(f"{base}/")
        with pytest.raises(ValueError, match=r"cannot serve on 127.0.0.1:\d+: .* another --port"):
            serving("127.0.0.1", port, registry, dict).__enter__()


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--control", "nonsense"], "--control nonsense: give a name and an address"),
        (["--control", "bf16=http://host:30000x/metrics"], "Port could not be cast to integer"),
        (["--control", "bf16=http://host:99999/metrics"], "Port out of range"),
        (["--control", "bf16=ftp://host/metrics"], "is no address: give one such as http://"),
        (["--treatment", "int8=http:///metrics"], "is no address: give one such as http://"),
        (["--treatment", "int8=http://host/a b"], "holds characters that no address has"),
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
        arm.take(read_page(text(capacity=10, bytes=2, seconds=1, tokens=2), 1.0))
    registry.register(Comparison(*arms))
    page = generate_latest(registry)
    assert b"hiqcache_restore_time_ratio" in page
    checked = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
