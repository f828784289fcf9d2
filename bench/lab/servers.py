"""Starts real SGLang servers on loopback, and ends them with everything they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from hiqcache import direct_http

#: What stock SGLang needs to run on a machine without a GPU. --sleep-on-idle, and OpenMP threads
#: that sleep while they wait: an idle server would otherwise spin on a core that another needs.
#: A GPU is hidden: SGLang would load kernels for it that an environment for CPUs does not hold.
CPU_ENV = {
    "SGLANG_PLATFORM": "hiqcache_cpu",
    "OMP_WAIT_POLICY": "PASSIVE",
    "CUDA_VISIBLE_DEVICES": "",
}
CPU_ARGS = (
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
)

#: What SGLang's documentation recommends for HiCache on a GPU, and its defaults; named, so that a
#: command says what it ran.
GPU_ARGS = ("--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel")

_PR_SET_PDEATHSIG = 1


class ServerError(RuntimeError):
    """A server did not start, or ended early; the text holds the last lines of its log."""


#: Where servers listen: below what the kernel gives to outgoing connections and to SGLang's own
#: sockets (from 32768), and below the ports that SGLang draws for itself (22000 to 29999). A port
#: of those ranges that is free now may be taken by the time a server has loaded its model.
PORTS = range(10_000, 20_000)


def free_port() -> int:
    """A loopback TCP port of PORTS that nothing listens on now. Raises ServerError if none is."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on 127.0.0.1.")


@dataclass
class Server:
    """One SGLang server; a context manager that starts it and ends it.

    args: SGLang arguments after the model, host and port.
    l2: whether it has a host tier; PD decode servers have none.
    env: variables set on top of this process's, without its HIQCACHE_ and SGLANG_PLATFORM ones.
    log: where its output goes.
    """

    name: str
    model: Path
    log: Path
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    l2: bool = True
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """The command line that starts the server."""
        return [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *(("--enable-hierarchical-cache",) if self.l2 else ()),
            *("--enable-metrics", "--enable-cache-report"),
            *self.args,
        ]

    def start(self) -> Server:
        """Start the process; ``wait`` says when it serves."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("HIQCACHE_") and name != "SGLANG_PLATFORM"
        }
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command(),
                # SGLang asks itself whether it serves, by a client that takes proxies.
                env={**inherited, **direct_http.past_proxies(), "HF_HUB_OFFLINE": "1", **self.env},
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return self

    def wait(self, timeout: float = 300, tick: Callable[[], None] = lambda: None) -> Server:
        """Wait until the server answers; ``tick`` is called about twice a second.

        Raises ServerError where it ends or takes longer than ``timeout`` seconds.
        """
        assert self.process is not None, "start the server first"
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerError(
                    f"{self.name} ended with status {self.process.returncode} before it served.\n"
                    + self.tail()
                )
            if direct_http.answers(f"{self.url}/health", timeout=30):
                return self
            tick()
            time.sleep(0.5)
        raise ServerError(f"{self.name} did not serve within {timeout:.0f} s.\n{self.tail()}")

    def tail(self, lines: int = 25) -> str:
        """The last lines of the log, headed by its path."""
        text = self.log.read_text(errors="replace").rstrip().splitlines()[-lines:]
        return "\n".join([f"last lines of {self.log}:", *text])

    def stop(self, grace: float = 15) -> None:
        """End the server and every process of its session; safe to call twice."""
        if self.process is None:
            return
        group = self.process.pid
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(grace)
        # The server's children are in its session; one that outlived it goes too.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


@contextlib.contextmanager
def started(*servers: Server) -> Iterator[None]:
    """Start all ``servers``, and end them on the way out, all at once: each may take its time."""
    try:
        for server in servers:
            server.start()
        yield
    finally:
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(Server.stop, servers))


@contextlib.contextmanager
def serving(*servers: Server, timeout: float = 300) -> Iterator[tuple[Server, ...]]:
    """Start all ``servers``, wait until they serve, and end them on the way out."""
    with started(*servers):
        for server in servers:
            server.wait(timeout)
        yield servers


def _end_with_parent() -> None:
    # Where this process is killed outright, the kernel ends the server too; SGLang asks the same
    # for its own children.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
