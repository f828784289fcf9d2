"""The stack of compose.yaml on loopback, without containers: two CPU servers, Prometheus, exporter,
canary, load. What the tests query and the preview draws.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
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
    """A program with a log, ended by its own process id.

    env: variables set on top of this process's.
    """

    name: str
    command: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __enter__(self) -> Process:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                cwd=REPOSITORY,
                env={**os.environ, **self.env},
                stdout=log,
                stderr=subprocess.STDOUT,
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
        return ask(self.prometheus, "query", {"query": expression})

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
    return ask(prometheus, "query_range", parameters)


def ask(prometheus: str, kind: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """The result of a query, or query_range, of the Prometheus at that address."""
    url = f"{prometheus}/api/v1/{kind}?{urlencode(parameters)}"
    result: list[dict[str, Any]] = direct_http.get(url, timeout=_TIMEOUT).json()["data"]["result"]
    return result


def loopback_config(targets: dict[str, str], expected: bool = True) -> dict[str, Any]:
    """prometheus.yml with every target moved to the value that ``targets`` has for its host:port.

    Of what is looked up in a network's DNS, that alone which ``targets`` names; and of the rest
    too, unless it is ``expected``: then a target that is not named raises KeyError.
    """
    config: dict[str, Any] = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["rule_files"] = [str(FOLDER / pattern) for pattern in config["rule_files"]]
    for job in config["scrape_configs"]:
        groups = job.setdefault("static_configs", [])
        for group in groups:
            named = [each for each in group["targets"] if expected or each in targets]
            group["targets"] = [targets[each] for each in named]
        for lookup in job.pop("dns_sd_configs", ()):
            for name in lookup["names"]:
                if target := targets.get(f"{name}:{lookup['port']}"):
                    groups.append({"targets": [target], "labels": {"__meta_dns_name": name}})
    jobs = [
        job
        for job in config["scrape_configs"]
        if any(group["targets"] for group in job["static_configs"])
    ]
    return {**config, "scrape_configs": jobs}


def prometheus_on(folder: Path, port: int, config: dict[str, Any]) -> Process:
    """Prometheus with ``config`` on loopback, its data and log in ``folder``.

    Raises StackError where it is not installed.
    """
    if shutil.which("prometheus") is None:
        raise StackError("prometheus is not installed: apt-get install prometheus")
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    return Process(
        "Prometheus",
        [
            *("prometheus", f"--config.file={file}", "--log.level=warn"),
            f"--storage.tsdb.path={folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        folder / "prometheus.log",
    )


@contextlib.contextmanager
def stack(folder: Path) -> Iterator[Stack]:
    """Start servers, exporter and Prometheus with logs and data under ``folder``; end them all.

    Raises StackError or ServerError where one does not start.
    """
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
    targets = {
        **{f"sglang-{arm}:30000": f"127.0.0.1:{server.port}" for arm, server in servers.items()},
        "exporter:9645": f"127.0.0.1:{ports['exporter']}",
        "canary:9647": f"127.0.0.1:{ports['canary']}",
        "locust:9646": f"127.0.0.1:{ports['load']}",
        "localhost:9090": f"127.0.0.1:{ports['prometheus']}",
    }
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
    prometheus = prometheus_on(folder, ports["prometheus"], loopback_config(targets))
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
