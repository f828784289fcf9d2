"""`make compose-test`: builds the images and runs the CPU stack as an operator would.

What cannot be had here is said in the output; nothing is taken for done that was not seen.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest

from hiqcache import __version__, direct_http
from tests.deploy.engine import Engine
from tests.deploy.stack import PROJECT, REPOSITORY, Stack, eventually, running
from tests.deploy.test_compose import CPU_STOCK_BYTES_PER_TOKEN

pytestmark = pytest.mark.docker

ARMS = {"bf16", "int8"}

#: What each of them answers on its published port.
PAGES = {"BF16": "/health", "INT8": "/health", "PROMETHEUS": "/-/healthy", "LOCUST": "/"}

#: A copy of it in results/compose is what test_compose.py holds the memory limits against.
FIGURES = REPOSITORY / "build" / "compose" / "cpu-stack.json"


@pytest.fixture(scope="module")
def stack(
    engine: Engine, missing_images: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    with running(engine, missing_images, tmp_path_factory.mktemp("compose")) as found:
        yield found


def test_one_command_brings_everything_up_healthy(stack: Stack) -> None:
    start = time.monotonic()
    try:
        stack.compose("up", "--detach", "--no-build", "--wait", "--wait-timeout", "560")
    except Exception:
        print(stack.compose("ps", "--all"), stack.compose("logs", "--tail", "40"), flush=True)
        raise
    print(f"  up --wait took {time.monotonic() - start:.0f} s", flush=True)
    running = set(stack.compose("ps", "--services").split())
    assert {"sglang-bf16", "sglang-int8", "exporter", "locust", "prometheus"} <= running


def test_within_two_minutes_prometheus_sees_arms_load_and_exporter(stack: Stack) -> None:
    up = eventually(
        "both arms are scraped",
        lambda: stack.by_arm('up{job="sglang"} == 1').keys() >= ARMS,
        120,
    )
    assert up
    eventually("the exporter is scraped", lambda: stack.query('up{job="exporter"} == 1'), 60)
    eventually("Locust reports that it runs", lambda: stack.query("hiqcache_load_running == 1"), 60)
    eventually(
        "both arms answer the load",
        lambda: (
            stack.by_arm('sum by (arm) (hiqcache_load_requests_total{outcome="ok"}) > 0').keys()
            >= ARMS
        ),
        120,
    )


def test_int8_holds_more_tokens_in_the_same_bytes(stack: Stack) -> None:
    tokens = stack.by_arm("sum by (arm) (hiqcache_l2_capacity_tokens)")
    size = stack.by_arm("sum by (arm) (hiqcache_l2_capacity_bytes)")
    per_token = stack.by_arm("max by (arm) (hiqcache_l2_bytes_per_token)")
    print(f"  tokens {tokens}, bytes {size}, bytes per token {per_token}", flush=True)
    assert per_token["bf16"] == CPU_STOCK_BYTES_PER_TOKEN
    assert size["int8"] <= size["bf16"]
    assert tokens["int8"] > 1.8 * tokens["bf16"]


def test_both_arms_restore_from_l2(stack: Stack) -> None:
    def restored() -> dict[str, float]:
        return stack.by_arm("sum by (arm) (hiqcache_restore_tokens_total)")

    first = restored()
    # The load must first have evicted a prefix from L1 and then asked for it again: some 15
    # requests an arm, which a machine that has other work to do answers slowly.
    eventually(
        "restored tokens rise in both arms",
        lambda: all(restored()[arm] > first.get(arm, 0) for arm in ARMS),
        600,
    )
    failed = stack.query('sum(hiqcache_load_requests_total{outcome!="ok"})')
    assert failed
    assert failed[0][1] == 0, "requests failed while the stack was healthy"


def test_memory_is_recorded_for_the_limits(stack: Stack) -> None:
    used = {}
    for arm in sorted(ARMS):
        script = (
            "from pathlib import Path; r = Path('/sys/fs/cgroup');"
            "m = r / 'memory.peak'; v1 = r / 'memory/memory.max_usage_in_bytes';"
            "print((m if m.exists() else v1).read_text())"
        )
        text = stack.compose("exec", "-T", f"sglang-{arm}", "python", "-I", "-c", script)
        used[arm] = int(text)
    print(f"  memory at most: {used}", flush=True)
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    figures = {
        "command": "make compose-test",
        "what": "peak memory of each server's cgroup, file cache included",
        "machine": f"{os.cpu_count()} CPUs, no GPU",
        "memory_bytes": used,
    }
    FIGURES.write_text(json.dumps(figures, indent=2) + "\n")


def test_the_page_of_locust_has_the_token_columns(stack: Stack) -> None:
    figures = direct_http.get(stack.url("LOCUST", "/stats/requests")).json()
    (table,) = figures["extended_stats"]
    assert {row["method"] for row in table["data"]} == ARMS
    assert all(row["ttft_p50"] > 0 for row in table["data"])


def test_containers_are_confined(stack: Stack) -> None:
    for service in ("sglang-bf16", "sglang-int8", "exporter", "locust", "locust-worker"):
        read_only = "{{.HostConfig.ReadonlyRootfs}} {{.Config.User}}"
        assert stack.inspect(service, read_only) == "true 10001:10001", service
    for name in ("BF16", "INT8", "PROMETHEUS", "LOCUST"):
        assert direct_http.get(stack.url(name, PAGES[name])).status == 200
    listening = stack.engine.docker(
        "ps", "--filter", f"label=com.docker.compose.project={PROJECT}", "--format", "{{.Ports}}"
    ).stdout
    published = [part for part in listening.replace("\n", ",").split(",") if "->" in part]
    assert published
    assert all(part.strip().startswith("127.0.0.1:") for part in published), published


def test_the_doctor_runs_in_the_container(stack: Stack) -> None:
    entrypoint = ("python", "/opt/hiqcache/entrypoint.py", "doctor")
    report = stack.compose("exec", "-T", "sglang-int8", *entrypoint, check=False)
    print("  " + report.replace("\n", "\n  "), flush=True)
    assert "plug-in: seen by SGLang" in report
    assert "settings: codec int8" in report


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        (("HICACHE_GB=1", "HICACHE_RATIO=2"), "both size L2"),
        (("HIQCACHE_CODEC=int3",), "must be one of"),
        (("HICACHE_GB=100000",), "L2 takes"),
    ],
)
def test_a_bad_setting_stops_the_container_at_once(
    stack: Stack, variables: tuple[str, ...], named: str
) -> None:
    given = ("HIQCACHE_CODEC=int8", *variables)
    flags = [part for variable in given for part in ("--env", variable)]
    image = f"hiqcache/server-cpu:{__version__}"
    done = stack.engine.docker("run", "--rm", *flags, image, check=False, timeout=60)
    assert done.returncode == 2
    assert named in done.stderr


def test_a_killed_arm_raises_the_alert_and_recovers(stack: Stack) -> None:
    def firing() -> set[str]:
        alerts = direct_http.get(stack.url("PROMETHEUS", "/api/v1/alerts")).json()
        return {
            alert["labels"]["arm"]
            for alert in alerts["data"]["alerts"]
            if alert["labels"]["alertname"] == "HiQCacheArmDown" and alert["state"] == "firing"
        }

    assert not firing()
    stack.compose("kill", "sglang-int8")
    eventually("the alert fires", lambda: firing() == {"int8"}, 120)
    failed = 'sum(hiqcache_load_requests_total{arm="int8",outcome!="ok"})'
    eventually("Locust counts the failures", lambda: stack.query(failed)[0][1] > 0, 60)
    assert stack.by_arm('up{job="sglang"}')["bf16"] == 1
    exporter = stack.query('up{job="exporter"}')
    assert exporter[0][1] == 1, "an arm that is down took the exporter with it"

    answered = 'hiqcache_load_requests_total{arm="int8",outcome="ok"}'
    before = stack.by_arm(f"sum by (arm) ({answered})")["int8"]
    stack.compose("up", "--detach", "--no-build", "--no-recreate", "--wait", "sglang-int8")
    eventually("the alert ends", lambda: not firing(), 120)
    eventually(
        "the arm answers again",
        lambda: stack.by_arm(f"sum by (arm) ({answered})")["int8"] > before,
        120,
    )


def test_prometheus_finds_its_data_after_a_restart(stack: Stack) -> None:
    moment = time.time()
    eventually("there is data", lambda: stack.query('up{job="sglang"}', moment), 30)
    stack.compose("restart", "prometheus")
    kept = eventually("its data is back", lambda: stack.query('up{job="sglang"}', moment), 120)
    assert {labels["arm"] for labels, _ in kept} == ARMS
    eventually("it scrapes again", lambda: stack.by_arm('up{job="sglang"}').keys() >= ARMS, 60)


def test_more_load_processes_by_scale(stack: Stack) -> None:
    stack.compose(
        "up", "--detach", "--no-build", "--no-deps", "--scale", "locust-worker=2", "locust-worker"
    )
    url = stack.url("LOCUST", "/stats/requests")
    eventually(
        "two workers report",
        lambda: len(direct_http.get(url).json().get("workers", ())) >= 2,
        60,
    )


def test_a_server_stops_cleanly_within_its_grace_period(stack: Stack) -> None:
    stack.compose("stop", "locust", "locust-worker")
    start = time.monotonic()
    stack.compose("stop", "sglang-bf16")
    took = time.monotonic() - start
    code = stack.inspect("sglang-bf16", "{{.State.ExitCode}}")
    print(f"  stopped with {code} after {took:.1f} s", flush=True)
    assert code in ("0", "143"), "137 would be a kill after the grace period"
