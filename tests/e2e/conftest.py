"""Real servers with a real model, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bench.lab.models import prepare
from bench.lab.servers import CPU_ARGS, CPU_ENV, Server
from tests.e2e.forking import ForkingServer

#: L1 of the servers under test, in tokens.
L1_TOKENS = 1024

MakeServer = Callable[..., Server]


@pytest.fixture(scope="session")
def model() -> Path:
    return prepare()


@pytest.fixture(scope="session")
def make_server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeServer:
    """A server of ``codec`` with further SGLang arguments; not yet started.

    ``spawns``: whether it starts as SGLang does; else its processes are forked (forking.py).
    """

    def make(
        codec: str,
        *args: str,
        name: str = "server",
        folder: Path = model,
        l2: bool = True,
        spawns: bool = False,
        **env: str,
    ) -> Server:
        log = tmp_path_factory.mktemp(name) / "server.log"
        sizes = ("--max-total-tokens", str(L1_TOKENS), "--hicache-ratio", "3")
        return (Server if spawns else ForkingServer)(
            f"{codec} {name}",
            folder,
            log,
            (*CPU_ARGS, *sizes, "--skip-server-warmup", *args),
            {**CPU_ENV, "HIQCACHE_CODEC": codec, **env},
            l2=l2,
        )

    return make
