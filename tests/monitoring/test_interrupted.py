"""Prometheus and the exporter killed and started again, and a volume that fills up, over two pages
that count on meanwhile.

The pages stand in for servers, which have no part in it: whoever scrapes them pulls.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from bench.lab.servers import free_port
from hiqcache import direct_http
from monitoring.stack import Process, loopback_config, query_range

pytestmark = pytest.mark.monitoring

SERIES = 'hiqcache_restore_tokens_total{arm="int8"}'


class _Page(BaseHTTPRequestHandler):
    """Counts a hundred tokens per second, and has been up for an hour."""

    def do_GET(self) -> None:
        tokens = int(360_000 + 100 * time.monotonic())
        body = f"# TYPE hiqcache_restore_tokens_total counter\n{SERIES.split('{')[0]} {tokens}\n"
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def page() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@dataclass
class Watching:
    """Prometheus and the exporter, and where they answer that they are ready."""

    prometheus: str
    processes: list[tuple[Process, str]]

    def samples(self, start: float, end: float) -> list[Any]:
        """Values of SERIES between two times, one for each five seconds that has one."""
        rows = query_range(self.prometheus, SERIES, start, end, 5)
        return [float(value) for row in rows for _, value in row["values"]]

    def wait_for(self, expression: str) -> None:
        deadline = time.monotonic() + 60
        while True:
            now = time.time()
            if query_range(self.prometheus, expression, now, now, 5):
                return
            assert time.monotonic() < deadline, f"{expression} has no value within a minute"
            time.sleep(0.5)


@contextlib.contextmanager
def watched(tmp_path: Path, within: Sequence[str] = ()) -> Iterator[Watching]:
    """``within``: a command that runs Prometheus's, whose words follow it."""
    with page() as bf16, page() as int8, contextlib.ExitStack() as running:
        ports = {name: free_port() for name in ("exporter", "prometheus")}
        nobody = f"127.0.0.1:{free_port()}"
        targets = {
            "sglang-bf16:30000": f"127.0.0.1:{bf16}",
            "sglang-int8:30000": f"127.0.0.1:{int8}",
            "exporter:9645": f"127.0.0.1:{ports['exporter']}",
            "canary:9647": nobody,
            "locust:9646": nobody,
            "localhost:9090": f"127.0.0.1:{ports['prometheus']}",
        }
        config = tmp_path / "prometheus.yml"
        config.write_text(yaml.safe_dump(loopback_config(targets)))
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        exporter = Process(
            "the exporter",
            [
                *(sys.executable, "-m", "hiqcache.cli", "exporter"),
                *("--port", str(ports["exporter"])),
                *("--control", f"bf16=http://127.0.0.1:{bf16}/metrics"),
                *("--treatment", f"int8=http://127.0.0.1:{int8}/metrics"),
            ],
            tmp_path / "exporter.log",
        )
        prometheus = Process(
            "Prometheus",
            [
                *(*within, "prometheus", f"--config.file={config}", "--log.level=warn"),
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{ports['prometheus']}",
            ],
            tmp_path / "prometheus.log",
        )
        ready = [
            (exporter, f"{urls['exporter']}/healthz"),
            (prometheus, f"{urls['prometheus']}/-/ready"),
        ]
        for process, url in ready:
            running.enter_context(process)
            process.wait_for(url)
        yield Watching(urls["prometheus"], ready)


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    with watched(tmp_path) as found:
        yield found


def test_nothing_is_lost_but_what_was_not_scraped(watching: Watching) -> None:
    watching.wait_for('hiqcache_arm_up{arm="int8"} == 1')
    watching.wait_for(SERIES)
    killed = time.time()
    (before, *_) = watching.samples(killed, killed)
    for process, url in watching.processes:
        assert process.process is not None
        process.process.kill()
        process.process.wait()
        assert not direct_http.answers(url, timeout=5)
    # Long enough for a scrape to be missed.
    time.sleep(6)
    for process, url in watching.processes:
        process.__enter__()
        process.wait_for(url)
    again = time.time()
    watching.wait_for(f"timestamp({SERIES}) > {again:.0f}")
    arm = 'hiqcache_arm_up{arm="int8"}'
    watching.wait_for(f"{arm} == 1 and timestamp({arm}) > {again:.0f}")
    assert watching.samples(killed, killed) == [before], "what was on disk is gone"
    (after, *_) = watching.samples(time.time(), time.time())
    assert after >= before + 600, "the server's counter did not go on meanwhile"
    rows = query_range(
        watching.prometheus, 'ALERTS{alertstate="firing"}', time.time(), time.time(), 5
    )
    assert [row["metric"]["alertname"] for row in rows] == []


#: Runs what follows with a volume of its own at "$1", of so many bytes.
VOLUME = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
MOUNTED = 'mount -t tmpfs -o size=16m tmpfs "$1" && shift && exec "$@"'


def test_a_full_volume_costs_the_samples_of_its_time(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    within = [*VOLUME, MOUNTED, "sh", str(data)]
    tried = subprocess.run([*within, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"this machine gives no volume of its own to a test: {tried.stderr.strip()}")
    with watched(tmp_path, within) as watching:
        (exporter, healthy), (prometheus, _) = watching.processes
        log = tmp_path / "prometheus.log"
        watching.wait_for('hiqcache_arm_up{arm="int8"} == 1')
        watching.wait_for(SERIES)
        full = time.time()
        (before, *_) = watching.samples(full, full)
        assert prometheus.process is not None
        filler = Path(f"/proc/{prometheus.process.pid}/root{data}/filler")
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(2**25))
        deadline = time.monotonic() + 60
        while "no space left on device" not in log.read_text():
            assert time.monotonic() < deadline, "Prometheus does not say that its disk is full"
            time.sleep(0.5)
        # It still answers, from what it has; what it watches does not notice.
        assert watching.samples(full, full) == [before]
        assert direct_http.answers(healthy, timeout=5)
        assert exporter.process is not None
        assert exporter.process.poll() is None
        filler.unlink()
        again = time.time()
        watching.wait_for(f"timestamp({SERIES}) > {again:.0f}")
        assert watching.samples(full, full) == [before]
        (after, *_) = watching.samples(time.time(), time.time())
        assert after > before
