"""A Mooncake master and one store, as processes that talk over TCP on loopback.

The store is a process of its own: pages outlive the servers that wrote them. It needs the package
mooncake-transfer-engine-non-cuda, and Debian's libibverbs1, which its library is linked to though
TCP uses none of it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from bench.lab.servers import ServerError, free_port
from hiqcache import direct_http


class Mooncake:
    """A context manager that starts both and ends them. ``gigabytes`` is what the store holds."""

    def __init__(self, folder: Path, gigabytes: float = 0.5) -> None:
        self._folder, self._bytes = folder, int(gigabytes * 2**30)
        self.master_port, self.metrics_port, self.store_port = (free_port() for _ in range(3))
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def settings(self) -> dict[str, object]:
        """What a server that holds no pages itself takes as its backend's extra config."""
        return {
            "master_server_address": f"127.0.0.1:{self.master_port}",
            "master_metrics_port": self.metrics_port,
            "metadata_server": "P2PHANDSHAKE",
            "local_hostname": "127.0.0.1",
            "protocol": "tcp",
            "device_name": "",
            "global_segment_size": 0,
        }

    @property
    def config(self) -> Path:
        """A file of ``settings``, which SGLANG_HICACHE_MOONCAKE_CONFIG_PATH may name."""
        file = self._folder / "mooncake-client.json"
        file.write_text(json.dumps(self.settings), encoding="utf-8")
        return file

    def __enter__(self) -> Mooncake:
        found = importlib.util.find_spec("mooncake")
        if found is None or found.origin is None:
            raise ServerError(
                "the package mooncake-transfer-engine-non-cuda is not installed: run `make env`."
            )
        master = Path(found.origin).parent / "mooncake_master"
        store = {**self.settings, "global_segment_size": self._bytes, "local_buffer_size": 2**24}
        config = self._folder / "mooncake-store.json"
        config.write_text(json.dumps(store), encoding="utf-8")
        try:
            self._start(
                "master",
                str(master),
                *(f"--rpc_port={self.master_port}", f"--metrics_port={self.metrics_port}"),
                *("--rpc_address=127.0.0.1", "--default_kv_lease_ttl=100"),
            )
            self._answers(f"http://127.0.0.1:{self.metrics_port}/metrics")
            self._start(
                "store",
                *(sys.executable, "-m", "mooncake.mooncake_store_service"),
                *("--config", str(config), "--port", str(self.store_port)),
            )
            segments = f"http://127.0.0.1:{self.metrics_port}/get_all_segments"
            self._answers(segments, text="127.0.0.1")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End both; safe to call twice."""
        for process in reversed(self._processes):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()
        self._processes.clear()

    def _start(self, name: str, *command: str) -> None:
        with (self._folder / f"mooncake-{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
                )
            )

    def _answers(self, url: str, text: str = "") -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            for process in self._processes:
                if process.poll() is not None:
                    break
            else:
                with contextlib.suppress(direct_http.HttpError):
                    if text in direct_http.get(url, timeout=5).text:
                        return
                time.sleep(0.2)
                continue
            break
        logs = "\n".join(
            f"{log}: {log.read_text(errors='replace')[-2000:]}"
            for log in sorted(self._folder.glob("mooncake-*.log"))
        )
        raise ServerError(f"Mooncake does not serve {url}.\n{logs}")
