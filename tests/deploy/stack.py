"""A CPU stack of compose.yaml under test: its commands, and questions to its Prometheus."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from bench.lab.servers import free_port
from hiqcache import direct_http
from tests.deploy import images
from tests.deploy.engine import Engine, leftovers

REPOSITORY = Path(__file__).parents[2]
PROJECT = "hiqcache-test"


@dataclass
class Stack:
    """A Compose project of its own name, on ports of its own.

    files: the Compose files, ports: what the variables <NAME>_PORT say. profiles: in place of the
    one that .env names; none: that one.
    """

    engine: Engine
    files: tuple[Path, ...]
    ports: dict[str, int]
    profiles: tuple[str, ...] = ()

    def compose(self, *arguments: str, timeout: float = 600, check: bool = True) -> str:
        """Run ``docker compose …``; returns its standard output. Raises EngineError."""
        files = [part for file in self.files for part in ("--file", str(file))]
        profiles = [part for name in self.profiles for part in ("--profile", name)]
        variables = {f"{name}_PORT": str(port) for name, port in self.ports.items()}
        return self.engine.docker(
            *("compose", "--project-name", PROJECT, "--project-directory", str(REPOSITORY)),
            *files,
            *profiles,
            *arguments,
            timeout=timeout,
            check=check,
            env=variables,
        ).stdout

    def container(self, service: str) -> str:
        """The id of a service's only container."""
        (name,) = self.compose("ps", "--all", "--quiet", service).split()
        return name

    def inspect(self, service: str, template: str) -> str:
        """What ``docker inspect`` says of a service's container."""
        return self.engine.docker(
            "inspect", "--format", template, self.container(service)
        ).stdout.strip()

    def url(self, name: str, path: str = "") -> str:
        """The address of what is published under ``<name>_PORT``."""
        return f"http://127.0.0.1:{self.ports[name]}{path}"

    def query(self, promql: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Ask Prometheus: labels and value of every series. Raises HttpError."""
        asked = urlencode({"query": promql, **({} if at is None else {"time": at})})
        answer = direct_http.get(self.url("PROMETHEUS", f"/api/v1/query?{asked}"), timeout=30)
        rows: list[dict[str, Any]] = answer.json()["data"]["result"]
        return [(row["metric"], float(row["value"][1])) for row in rows]

    def by_arm(self, promql: str) -> dict[str, float]:
        """The values of ``promql``, which must keep the arm label, by arm."""
        return {labels["arm"]: value for labels, value in self.query(promql)}


@contextlib.contextmanager
def running(
    engine: Engine, missing_images: Sequence[str], folder: Path, *profiles: str
) -> Iterator[Stack]:
    """A stack whose services the caller starts, and of which nothing is left afterwards.

    missing_images: what cannot be pulled here. Raises AssertionError where something is left.
    """
    files = [REPOSITORY / "compose.yaml"]
    if images.GRAFANA in missing_images:
        print(
            f"NOT TESTED HERE: {images.GRAFANA} cannot be pulled, so no Grafana runs. Its "
            "configuration, dashboards and queries have tests of their own.",
            flush=True,
        )
        override = folder / "without-grafana.yaml"
        override.write_text("services:\n  grafana:\n    profiles: [cannot-be-pulled]\n")
        files.append(override)
    names = ("BF16", "INT8", "ROUTER", "PROMETHEUS", "GRAFANA", "LOCUST")
    found = Stack(engine, tuple(files), {name: free_port() for name in names}, profiles)
    try:
        yield found
    finally:
        found.compose("down", "--volumes", "--timeout", "60")
        left = leftovers(engine, PROJECT)
    assert not left, f"down -v left {left}"
    print("down -v: no container, volume or network is left", flush=True)


def eventually(what: str, holds: Callable[[], Any], timeout: float) -> Any:
    """Ask until ``holds()`` is true, and return what it returned. Raises AssertionError.

    A connection refused meanwhile (a service that restarts) counts as not yet.
    """
    start, last = time.monotonic(), None
    while time.monotonic() - start < timeout:
        try:
            last = holds()
        except (direct_http.HttpError, KeyError) as error:
            last = error
        else:
            if last:
                print(f"  {what}: {last} after {time.monotonic() - start:.0f} s", flush=True)
                return last
        time.sleep(2)
    raise AssertionError(f"{what}: not within {timeout:.0f} s; last seen: {last!r}")
