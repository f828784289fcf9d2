"""The fleet of compose.yaml on loopback, without containers: two replicas that share L3, the router
in front of them, Prometheus; with the profile mooncake, a store behind them.

What a container is told there, the process is told here: flags and variables are read from that
file.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from bench import REPOSITORY
from bench.lab.models import prepare
from bench.lab.mooncake import Mooncake
from bench.lab.server_metrics import by_labels
from bench.lab.servers import CPU_ARGS, CPU_ENV, Server, free_port, serving
from hiqcache import direct_http
from monitoring.stack import Process, ask, loopback_config, prometheus_on

#: The replicas, as compose.yaml and the arm label call them.
REPLICAS = ("replica-1", "replica-2")

#: Where the router and the servers listen in their containers.
_PORT, _ROUTER_METRICS_PORT, _STORE_METRICS_PORT = 30000, 29000, 9003


@dataclass
class Fleet:
    """A running fleet.

    replicas: by arm. router, router_metrics, prometheus: addresses. model: the name to ask for.
    """

    replicas: dict[str, Server]
    router: str
    router_metrics: str
    prometheus: str
    model: str
    folder: Path

    def query(self, expression: str) -> dict[str, float]:
        """An instant query's values by arm (or by job, where there is no arm)."""
        samples = ask(self.prometheus, "query", {"query": expression})
        return {
            sample["metric"].get("arm") or sample["metric"]["job"]: float(sample["value"][1])
            for sample in samples
        }

    def routed(self) -> dict[str, float]:
        """Requests that the router has sent to each replica."""
        page = direct_http.get(f"{self.router_metrics}/metrics", timeout=30).text
        counted = by_labels(page, ("worker",), "smg_worker_requests_")
        return {
            arm: counted.get((server.url,), {}).get("total", 0.0)
            for arm, server in self.replicas.items()
        }

    def healthy(self) -> int:
        """Replicas that the router takes for healthy."""
        answer = direct_http.get(f"{self.router}/readiness", timeout=30).json()
        return int(answer["healthy_workers"])

    def load(self, conversations: int) -> Process:
        """Locust, holding so many conversations through the router; use it with ``with``."""
        options = {
            **{
                name.removeprefix("LOAD_").lower().replace("_", "-"): value
                for name, value in _environment("locust-fleet").items()
            },
            "arms": f"fleet={self.router}",
            "requests": conversations,
            "think-time": 0,
            "users": 2,
            "spawn-rate": 2,
            "metrics-port": free_port(),
            "result-file": self.folder / "load.json",
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
        return Process("the load", [*command, *flags], self.folder / "load.log")


@contextlib.contextmanager
def fleet(folder: Path, storage: Literal["file", "mooncake"]) -> Iterator[Fleet]:
    """Start store, replicas, router and Prometheus, with logs and data under ``folder``; end all.

    Raises StackError or ServerError where one does not start.
    """
    with contextlib.ExitStack() as running:
        store = running.enter_context(Mooncake(folder)) if storage == "mooncake" else None
        replicas = {arm: _replica(arm, folder, storage, store) for arm in REPLICAS}
        running.enter_context(serving(*replicas.values()))
        ports = {name: free_port() for name in ("router", "metrics", "prometheus")}
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        # It takes proxies, which reach no replica; in compose.yaml they are excepted by name.
        router = Process(
            "the router",
            _router(replicas, ports),
            folder / "router.log",
            direct_http.past_proxies(),
        )
        running.enter_context(router)
        router.wait_for(f"{urls['router']}/readiness")
        targets = {
            f"sglang-{arm}:{_PORT}": f"127.0.0.1:{server.port}" for arm, server in replicas.items()
        }
        targets[f"router:{_ROUTER_METRICS_PORT}"] = f"127.0.0.1:{ports['metrics']}"
        if store is not None:
            targets[f"mooncake-master:{_STORE_METRICS_PORT}"] = f"127.0.0.1:{store.metrics_port}"
        prometheus = prometheus_on(
            folder, ports["prometheus"], loopback_config(targets, expected=False)
        )
        running.enter_context(prometheus)
        prometheus.wait_for(f"{urls['prometheus']}/-/ready")
        model = _environment("locust-fleet")["LOAD_MODEL"]
        yield Fleet(replicas, urls["router"], urls["metrics"], urls["prometheus"], model, folder)


def _replica(arm: str, folder: Path, storage: str, store: Mooncake | None) -> Server:
    given = _environment(f"sglang-{arm}", FLEET_STORAGE=storage)
    args = (
        *("--max-total-tokens", given.pop("MAX_TOTAL_TOKENS")),
        *("--hicache-ratio", given.pop("HICACHE_RATIO")),
        *shlex.split(given.pop("SGLANG_ARGS")),
    )
    pages = folder / "l3"
    pages.mkdir(exist_ok=True)
    moved = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(pages)}
    if store is not None:
        moved["MOONCAKE_MASTER"] = f"127.0.0.1:{store.master_port}"
        moved["MOONCAKE_LOCAL_HOSTNAME"] = "127.0.0.1"
    return Server(
        arm,
        prepare(),
        folder / f"{arm}.log",
        (*CPU_ARGS, *args, "--skip-server-warmup"),
        {**CPU_ENV, **given, **moved},
    )


def _router(replicas: Mapping[str, Server], ports: Mapping[str, int]) -> list[str]:
    moved = {
        "--host=0.0.0.0": "--host=127.0.0.1",
        f"--port={_PORT}": f"--port={ports['router']}",
        "--prometheus-host=0.0.0.0": "--prometheus-host=127.0.0.1",
        f"--prometheus-port={_ROUTER_METRICS_PORT}": f"--prometheus-port={ports['metrics']}",
        **{f"http://sglang-{arm}:{_PORT}": server.url for arm, server in replicas.items()},
    }
    flags: list[str] = _service("router")["command"]
    missing = set(moved) - set(flags)
    assert not missing, f"compose.yaml's router is not told {missing}"
    return [sys.executable, "-m", "smg.launch_router", *(moved.get(flag, flag) for flag in flags)]


def _environment(service: str, **variables: str) -> dict[str, str]:
    """What a container of ``service`` is given where ``variables`` alone are set."""

    def value(variable: re.Match[str]) -> str:
        return variables.get(variable["name"]) or variable["default"]

    return {
        name: re.sub(r"\$\{(?P<name>\w+):?-(?P<default>[^}]*)\}", value, str(text))
        for name, text in _service(service)["environment"].items()
        if text is not None
    }


def _service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
    service: dict[str, Any] = found[name]
    return service
