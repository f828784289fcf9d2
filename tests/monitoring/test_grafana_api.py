"""Grafana's HTTP API, as far as a benchmark uses it, against a server that answers as Grafana does.

No Grafana server runs here; what it answers is taken from its API documentation. The tests that
need grafana-client run in a process that has it (test_with_its_client), and are skipped elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import REPOSITORY
from monitoring.grafana_api import FOLDER, annotate, connect, main

UIDS = sorted(file.stem for file in FOLDER.glob("*.json"))


class FakeGrafana:
    """Serves the dashboards in ``uids`` and keeps the annotations that it gets."""

    def __init__(self) -> None:
        self.uids = list(UIDS)
        self.annotations: list[dict[str, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self, status: int, body: dict[str, Any]) -> None:
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def do_GET(self) -> None:
                if self.headers["Authorization"] != "Bearer secret":
                    self.answer(401, {"message": "Invalid API key"})
                elif self.path.rpartition("/")[2] in fake.uids:
                    self.answer(200, {"dashboard": {"uid": self.path.rpartition("/")[2]}})
                else:
                    self.answer(404, {"message": "Dashboard not found"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fake.annotations.append(body)
                self.answer(200, {"message": "Annotation added", "id": len(fake.annotations)})

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.env = {
            "GRAFANA_URL": f"http://127.0.0.1:{self.server.server_port}",
            "GRAFANA_TOKEN": "secret",
        }


@pytest.fixture
def grafana() -> Iterator[FakeGrafana]:
    pytest.importorskip(
        "grafana_client", reason="run by test_with_its_client, in an environment of its own"
    )
    fake = FakeGrafana()
    threading.Thread(target=fake.server.serve_forever, daemon=True).start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def test_without_a_grafana_one_warning_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    connection = connect({})
    annotate(connection, "a run", 1.0, 2.0)
    assert connection is None
    assert len(caplog.records) == 1
    assert "GRAFANA_URL" in caplog.text


@pytest.mark.skipif("WITH_GRAFANA_CLIENT" in os.environ, reason="runs the others, here")
def test_with_its_client() -> None:
    """Everything below, with the packages of requirements/grafana.lock."""
    found = list((REPOSITORY / ".cache" / "grafana").glob("lib/python*/site-packages"))
    if not found:
        pytest.skip("`make test` makes .cache/grafana first, an environment for grafana-client")
    done = subprocess.run(
        # The conftest imports torch; what it sets in the environment is handed on.
        [
            *(sys.executable, "-m", "pytest", "-q", "-rs", "--noconftest"),
            *("-p", "no:cacheprovider", __file__),
        ],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(found[0]), "WITH_GRAFANA_CLIENT": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "1 skipped" in done.stdout  # this test


def test_the_runs_of_a_bench_are_marked(
    grafana: FakeGrafana, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs.jsonl"
    run = {"experiment": "b", "point": "oversubscribed", "repeat": 1, "seconds": 12.5}
    lines = [
        {**run, "arm": "fp8"},  # written before runs had a start
        {**run, "arm": "bf16", "started": 100.0},
        {**run, "arm": "int8", "started": 200.0},
        {**run, "arm": "mover", "started": 200.0, "ended": 230.0},  # it took turns with another
    ]
    runs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, value in grafana.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["grafana_api", str(runs), "--since", "150"])
    assert main() == 0
    assert {note["text"]: (note["time"], note["timeEnd"]) for note in grafana.annotations} == {
        "experiment b, oversubscribed, repeat 2: int8": (200_000, 212_500),
        "experiment b, oversubscribed, repeat 2: mover": (200_000, 230_000),
    }


def test_a_broken_log_is_one_warning(
    grafana: FakeGrafana,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = tmp_path / "runs.jsonl"
    runs.write_text('{"started": 5.0}\n')
    for name, value in grafana.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["grafana_api", str(runs)])
    assert main() == 0
    assert not grafana.annotations
    assert len(caplog.records) == 1


def test_a_run_is_marked_on_every_dashboard(
    grafana: FakeGrafana, caplog: pytest.LogCaptureFixture
) -> None:
    annotate(connect(grafana.env), "experiment A", 100.0, 160.5, ["int8"])
    assert sorted(note["dashboardUID"] for note in grafana.annotations) == UIDS
    for note in grafana.annotations:
        assert (note["time"], note["timeEnd"]) == (100_000, 160_500)
        assert note["tags"] == ["hiqcache", "int8"]
        assert note["text"] == "experiment A"
    assert not caplog.records


def test_a_dashboard_that_is_not_provisioned_is_named(
    grafana: FakeGrafana, caplog: pytest.LogCaptureFixture
) -> None:
    grafana.uids.remove("hiqcache-l2")
    assert connect(grafana.env) is not None
    (record,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "HiQCache: L2 detail" in record.getMessage()


def test_a_wrong_token_is_one_warning(
    grafana: FakeGrafana, caplog: pytest.LogCaptureFixture
) -> None:
    assert connect({**grafana.env, "GRAFANA_TOKEN": "wrong"}) is None
    assert len(caplog.records) == 1


def test_a_grafana_that_went_away_is_one_warning(
    grafana: FakeGrafana, caplog: pytest.LogCaptureFixture
) -> None:
    connection = connect(grafana.env)
    grafana.server.shutdown()
    grafana.server.server_close()
    annotate(connection, "a run", 1.0, 2.0)
    assert len(caplog.records) == 1


def test_a_grafana_that_is_not_there_is_one_warning(
    grafana: FakeGrafana, caplog: pytest.LogCaptureFixture
) -> None:
    grafana.server.shutdown()
    grafana.server.server_close()
    assert connect(grafana.env) is None
    assert len(caplog.records) == 1
