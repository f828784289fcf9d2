"""The stack of compose.yaml on loopback, without containers: two CPU servers, Prometheus, exporter,
canary, load. What the tests query and the preview draws.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import yaml

from bench import REPOSITORY
from bench.lab.models import prepare
from bench.lab.servers import CPU_ARGS, CPU_ENV, Server, free_port
from hiqcache import direct_http

FOLDER = Path(__file__).resolve().parent

#: L1 of both arms, and SGLang's default ratio of L2 to it: BF16's L2 then holds 2,049 tokens and
#: INT8's 3,965.
L1_TOKENS = 1024

#: A working set between the two: 7 prefixes, and what each request adds to its own.
GROUPS, PREFIX_TOKENS = 7, 384

#: A Prometheus answers in milliseconds; a server that computes on the same two cores may not.
_TIMEOUT = 60


class StackError(RuntimeError):
    """A part of the stack did not start; the text says which and shows its log."""


@dataclass
class Process:
    """A program with a log, ended by its own process id."""

    name: str
    command: Sequence[str]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Process:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self.process is not None
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def wait_for(self, url: str, timeout: float = 60) -> None:
        """Wait until ``url`` answers 200. Raises StackError."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self.process is not None
            if self.process.poll() is not None:
                break
            if direct_http.answers(url, timeout=_TIMEOUT):
                return
            time.sleep(0.3)
        raise StackError(f"{self.name} did not serve {url}:\n{self.log.read_text()[-3000:]}")


@dataclass
class Stack:
    """A running stack; ``servers`` by arm, the other processes by name."""

    servers: dict[str, Server]
    processes: dict[str, Process]
    prometheus: str
    exporter: str
    canary: str
    load_port: int
    folder: Path

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query. Raises HttpError where Prometheus refuses it."""
        return _ask(self.prometheus, "query", {"query": expression})

    def query_range(
        self, expression: str, start: float, end: float, step: float
    ) -> list[dict[str, Any]]:
        """The result of a range query, times in seconds of the epoch."""
        return query_range(self.prometheus, expression, start, end, step)

    def value(self, expression: str) -> float:
        """The one value of an instant query."""
        (sample,) = self.query(expression)
        return float(sample["value"][1])

    def rules(self) -> list[dict[str, Any]]:
        """Every rule with its health, as Prometheus reports it."""
        answer = direct_http.get(f"{self.prometheus}/api/v1/rules", timeout=_TIMEOUT).json()
        return [rule for group in answer["data"]["groups"] for rule in group["rules"]]

    def load(self, seconds: float) -> Process:
        """Locust, sending both arms the same requests for ``seconds``; use it with ``with``."""
        arms = ",".join(f"{arm}={server.url}" for arm, server in self.servers.items())
        options = {
            "arms": arms,
            "workload": "shared-prefix",
            "groups": GROUPS,
            "prefix-tokens": PREFIX_TOKENS,
            "suffix-tokens": 16,
            "output-tokens": 6,
            "users": 2,
            "spawn-rate": 2,
            "run-time": f"{seconds:.0f}s",
            "metrics-port": self.load_port,
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
        return Process("the load", [*command, *flags], self.folder / "load.log")


def query_range(
    prometheus: str, expression: str, start: float, end: float, step: float
) -> list[dict[str, Any]]:
    """The result of a range query of the Prometheus at that address, times in seconds."""
    parameters = {"query": expression, "start": start, "end": end, "step": step}
    return _ask(prometheus, "query_range", parameters)


def _ask(prometheus: str, kind: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    url = f"{prometheus}/api/v1/{kind}?{urlencode(parameters)}"
    result: list[dict[str, Any]] = direct_http.get(url, timeout=_TIMEOUT).json()["data"]["result"]
    return result


def loopback_config(targets: dict[str, str]) -> dict[str, Any]:
    """prometheus.yml with every target that ``targets`` names moved to its value.

    Jobs that look targets up in a network's DNS are left out.
    """
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["rule_files"] = [str(FOLDER / pattern) for pattern in config["rule_files"]]
    jobs = [job for job in config["scrape_configs"] if "static_configs" in job]
    for job in jobs:
        for group in job["static_configs"]:
            group["targets"] = [targets[target] for target in group["targets"]]
    return {**config, "scrape_configs": jobs}


@contextlib.contextmanager
def stack(folder: Path) -> Iterator[Stack]:
    """Start servers, exporter and Prometheus with logs and data under ``folder``; end them all.

    Raises StackError or ServerError where one does not start.
    """
    if shutil.which("prometheus") is None:
        raise StackError("prometheus is not installed: apt-get install prometheus")
    model = prepare()
    sizes = ("--max-total-tokens", str(L1_TOKENS), "--skip-server-warmup")
    servers = {
        arm: Server(
            f"the {arm} server",
            model,
            folder / f"server-{arm}.log",
            (*CPU_ARGS, *sizes, "--served-model-name", model.name),
            {**CPU_ENV, "HIQCACHE_CODEC": arm},
        )
        for arm in ("bf16", "int8")
    }
    ports = {name: free_port() for name in ("exporter", "canary", "load", "prometheus")}
    urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    config = folder / "prometheus.yml"
    targets = {
        **{f"sglang-{arm}:30000": f"127.0.0.1:{server.port}" for arm, server in servers.items()},
        "exporter:9645": f"127.0.0.1:{ports['exporter']}",
        "canary:9647": f"127.0.0.1:{ports['canary']}",
        "locust:9646": f"127.0.0.1:{ports['load']}",
        "localhost:9090": f"127.0.0.1:{ports['prometheus']}",
    }
    config.write_text(yaml.safe_dump(loopback_config(targets)))
    arms = {"control": "bf16", "treatment": "int8"}
    exporter = Process(
        "the exporter",
        [
            *(sys.executable, "-m", "hiqcache.cli", "exporter", "--port", str(ports["exporter"])),
            *(
                part
                for role, arm in arms.items()
                for part in (f"--{role}", f"{arm}={servers[arm].url}/metrics")
            ),
        ],
        folder / "exporter.log",
    )
    canary = Process(
        "the canary",
        [
            *(sys.executable, "-m", "hiqcache.cli", "canary", "--port", str(ports["canary"])),
            *(part for arm, server in servers.items() for part in ("--arm", f"{arm}={server.url}")),
            # Two prompts of 80 tokens in BF16's L2.
            *("--interval", "2", "--l2-share", "0.1"),
            *("--prefix-tokens", "64", "--scored-tokens", "16"),
        ],
        folder / "canary.log",
    )
    prometheus = Process(
        "Prometheus",
        [
            *("prometheus", f"--config.file={config}", "--log.level=warn"),
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{ports['prometheus']}",
        ],
        folder / "prometheus.log",
    )
    with contextlib.ExitStack() as running:
        # One after the other: both load a model, and SGLang refuses a pool where less than 10 GB of
        # the machine's memory are free.
        for server in servers.values():
            running.enter_context(server)
            server.wait()
        running.enter_context(exporter)
        exporter.wait_for(f"{urls['exporter']}/healthz")
        running.enter_context(canary)
        canary.wait_for(f"{urls['canary']}/healthz")
        running.enter_context(prometheus)
        prometheus.wait_for(f"{urls['prometheus']}/-/ready")
        yield Stack(
            servers,
            {"exporter": exporter, "canary": canary, "prometheus": prometheus},
            *(urls["prometheus"], urls["exporter"], urls["canary"], ports["load"], folder),
        )
