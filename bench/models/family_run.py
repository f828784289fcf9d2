"""One family's servers, an arm each: started, verified, timed when told, ended. In its own process.

What it finds goes through a pipe as it comes: (arm, name of the figures, the figures).
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.lab.arms import arm_named
from bench.lab.servers import CPU_ARGS, CPU_ENV, GPU_ARGS, Server, ServerError, started
from bench.lab.shards import Shards
from bench.models.families import Subject
from bench.models.timing import restores
from bench.verify.prompts import RandomPrompts
from bench.verify.stages import capacity, exact, pressure
from hiqcache.direct_http import HttpError

#: Lines of a failed server's log that go into its record.
TAIL = 60
#: No tokenizer: prompts are token ids. No graphs: prompts are what runs, and a start is shorter.
ARGS = (
    *("--skip-tokenizer-init", "--skip-server-warmup"),
    *("--disable-prefill-cuda-graph", "--disable-decode-cuda-graph"),
)
#: What a server on a GPU takes besides; a host may have its own (--sglang).
ON_GPU = (*GPU_ARGS, "--mem-fraction-static", "0.85")
#: Nothing compiled by torch: what it compiles anew for a shape may round otherwise than before, and
#: then a restored answer would differ from its reference.
GPU_ENV = {"TORCHDYNAMO_DISABLE": "1"}


def serve(
    subject: Subject,
    model: Path,
    logs: Path,
    cut: Shards,
    further: tuple[str, ...],
    cpu: bool,
    timeout: float,
    pipe: Connection,
) -> None:
    """Run ``subject`` from ``model``; ``pipe`` says "go" when its restores are to be timed.

    timeout: seconds for a start. Sends ("", "verified", None) before it waits for that word.
    """
    prompts = RandomPrompts()
    lock = threading.Lock()
    servers = {
        name: _server(name, subject, model, logs, cut, further, cpu) for name in subject.arms
    }

    def send(arm: str, name: str, figures: Any) -> None:
        with lock:
            pipe.send((arm, name, figures))

    def guarded(arm: str, work: Callable[[Server], None]) -> bool:
        """Whether ``work`` came to its end; what stopped it goes into the arm's record."""
        server = servers[arm]
        try:
            work(server)
        except (ServerError, HttpError) as error:
            send(arm, "failure", f"{error}\n{server.tail(TAIL)}")
        except Exception:
            send(arm, "failure", f"{traceback.format_exc()}\n{server.tail(TAIL)}")
        else:
            return True
        server.stop()
        return False

    def verified(arm: str) -> bool:
        def work(server: Server) -> None:
            server.wait(timeout)
            send(arm, "capacity", capacity(server))
            send(arm, "exact", exact(server, subject.sizes, prompts))
            send(arm, "pressure", pressure(server, subject.sizes, prompts))

        return guarded(arm, work)

    with started(*servers.values()):
        with ThreadPoolExecutor(len(servers)) as pool:
            left = [
                arm for arm, done in zip(servers, pool.map(verified, servers), strict=True) if done
            ]
        send("", "verified", None)
        pipe.recv()
        for arm in left:
            guarded(
                arm,
                lambda server, arm=arm: send(  # type: ignore[misc]
                    arm, "restores", [restores(server, each, prompts) for each in subject.timed]
                ),
            )
    send("", "ended", None)


def _server(
    name: str,
    subject: Subject,
    model: Path,
    logs: Path,
    cut: Shards,
    further: tuple[str, ...],
    cpu: bool,
) -> Server:
    arm = arm_named(name)
    return Server(
        f"{subject.name} {name}",
        model,
        logs / f"{subject.name}-{arm.file_name}.log",
        (
            *(CPU_ARGS if cpu else ON_GPU),
            *(ARGS[:2] if cpu else ARGS),
            *(*cut.args, *subject.args, *arm.args, *further),
        ),
        # The table refuses what no GPU has served; this is what serves it first.
        {**(CPU_ENV if cpu else GPU_ENV), **arm.env, "HIQCACHE_ALLOW_UNTRIED": "1"},
    )
