"""Servers that must not start, and servers that must end whole."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from bench.lab.servers import PORTS, ServerError, free_port
from tests.e2e.conftest import MakeServer

pytestmark = pytest.mark.e2e


def test_a_bad_setting_ends_the_server_before_it_loads_a_model(make_server: MakeServer) -> None:
    server = make_server("int7", name="bad-setting", spawns=True)
    with server, pytest.raises(ServerError, match="HIQCACHE_CODEC='int7': it must be one of"):
        server.wait(120)
    assert "Load weight" not in server.log.read_text()


def test_another_sglang_is_refused_by_name(make_server: MakeServer, tmp_path: Path) -> None:
    other = tmp_path / "sglang-0.5.99.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    server = make_server("int8", name="other-sglang", spawns=True, PYTHONPATH=str(tmp_path))
    with server, pytest.raises(ServerError, match=r"0\.5\.22; the installed version is 0\.5\.99"):
        server.wait(120)


@pytest.mark.parametrize(
    ("codec", "args", "message"),
    [
        ("int8", ("--hicache-mem-layout", "page_head"), "--hicache-mem-layout page_head"),
        ("int8", ("--kv-cache-dtype", "fp8_e4m3"), "the GPU's KV cache is torch.float8_e4m3fn"),
    ],
)
def test_a_pool_that_is_refused_ends_the_server_with_the_reason(
    codec: str, args: tuple[str, ...], message: str, make_server: MakeServer
) -> None:
    """The pool is built late, in a child process; its refusal must reach the log and end all."""
    server = make_server(codec, *args, name="refused-pool", spawns=True)
    with server:
        with pytest.raises(ServerError):
            server.wait(180)
        text = server.log.read_text()
    assert f"UnsupportedError: {message}" in text
    assert "fired up" not in text


def test_servers_listen_where_no_outgoing_connection_can_take_their_port() -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert PORTS.stop <= first_ephemeral
    assert free_port() in PORTS
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := free_port()))
        assert all(free_port() != port for _ in range(50))


def test_without_its_name_the_cpu_platform_is_not_activated() -> None:
    code = (
        "from sglang.srt.platforms import current_platform\n"
        "print(type(current_platform).__module__)"
    )
    env = {k: v for k, v in os.environ.items() if k != "SGLANG_PLATFORM"}
    for name, expected in (("", "sglang.srt.platforms"), ("hiqcache_cpu", "hiqcache.sglang")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**env, **({"SGLANG_PLATFORM": name} if name else {})},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip().startswith(expected)


def test_an_interrupted_demo_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.demo", "--out", str(tmp_path)]
    with subprocess.Popen(
        command,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # As at a terminal: what a shell starts in the background ignores interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as demo:
        process = psutil.Process(demo.pid)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            family = process.children(recursive=True)
            if len(family) >= 3:
                break
            time.sleep(0.5)
        assert len(family) >= 3, "the demo started no servers"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 130
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
