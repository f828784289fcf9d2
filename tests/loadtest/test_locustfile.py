"""The Locust file as a process: one arm that streams, one that is dead, and figures at the end."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.loadtest.test_streaming import Handler, chunk

# Looked for, not imported: Locust patches the process that imports it.
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None, reason="requirements/loadgen.lock is not installed"
)

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"


@pytest.fixture
def arm() -> Iterator[str]:
    """The address of a server that answers every request with two tokens."""

    class Streams(Handler):
        def script(self) -> None:  # type: ignore[override]
            self.begin()
            self.event(chunk(1))
            self.event(chunk(2, "length"))
            self.event("[DONE]")
            self.end()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Streams)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def locust(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"),
            *("--only-summary", "--metrics-port", "0", "--users", "2", "--spawn-rate", "2"),
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    file = tmp_path / "result.json"
    done = locust("--result-file", str(file), *arguments)
    assert file.exists(), done.stderr
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_a_load_ends_by_itself_and_counts_each_arm_apart(tmp_path: Path, arm: str) -> None:
    result = run(
        tmp_path,
        *("--arms", f"bf16={arm},dead=http://127.0.0.1:1", "--requests", "3"),
        *("--groups", "2", "--prefix-tokens", "8"),
    )
    arms = result["arms"]["shared-prefix"]
    assert arms["bf16"]["requests"] == {"ok": 3, "error": 0, "timeout": 0, "truncated": 0}
    assert arms["bf16"]["tokens"]["output"] == 6
    assert arms["dead"]["requests"]["error"] == 3
    assert not any(arms["dead"]["seconds"].values())
    assert result["options"]["requests"] == 3


def test_chat_holds_every_turn(tmp_path: Path, arm: str) -> None:
    result = run(
        tmp_path,
        *("--arms", f"only={arm}", "--workload", "chat", "--turns", "3", "--requests", "2"),
    )
    assert result["arms"]["chat"]["only"]["requests"]["ok"] == 6


def test_arrivals_later_than_due_are_counted(tmp_path: Path, arm: str) -> None:
    rows = [
        {"timestamp": 0, "input_length": 4, "output_length": 2, "hash_ids": [1]},
        {"timestamp": 300, "input_length": 4, "output_length": 2, "hash_ids": [1]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = run(tmp_path, "--arms", f"only={arm}", "--workload", "trace", "--trace", str(trace))
    assert result["arms"]["trace"]["only"]["requests"]["ok"] == 2
    assert set(result["started_late"]) == {"only"}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--arms", "bf16"), "name=http://host:port"),
        (("--groups", "0"), "at least 1"),
        (("--workload", "trace"), "--trace is needed"),
        (("--workload", "trace", "--trace", "missing.jsonl"), "missing.jsonl"),
        (("--rate", "-1"), "--rate"),
    ],
)
def test_bad_options_stop_the_start(arguments: tuple[str, ...], named: str) -> None:
    done = locust(*arguments)
    assert done.returncode != 0
    assert named in done.stdout + done.stderr
