"""The containers' entry point: what it starts, and what it refuses before a model is loaded."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.lab.servers import CPU_ARGS
from hiqcache.compatibility import UnsupportedError
from hiqcache.settings import Settings
from tests.deploy.launched import ranks_of_a_host
from tests.model_folders import (
    DEEPSEEK_V3,
    GEMMA3_4B,
    GPT_OSS_20B,
    MAMBA2,
    PHI2,
    QWEN3_8B,
    QWEN3_NEXT,
    without,
    write,
)
from tests.sglang.assembled import apart

REPOSITORY = Path(__file__).parents[2]
ENTRYPOINT = REPOSITORY / "docker" / "entrypoint.py"


@pytest.fixture(scope="module")
def entrypoint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("entrypoint", ENTRYPOINT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["entrypoint"] = module
    spec.loader.exec_module(module)
    return module


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point as a container would, in an environment of its own."""
    return subprocess.run(
        [sys.executable, str(ENTRYPOINT), *arguments],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({}, "MODEL is not set"),
        ({"MODEL": "m", "HICACHE_GB": "8", "HICACHE_RATIO": "2"}, "both size L2"),
        ({"MODEL": "m", "HICACHE_GB": "1.5"}, "HICACHE_GB='1.5'"),
        ({"MODEL": "m", "HICACHE_GB": "0"}, "HICACHE_GB='0'"),
        ({"MODEL": "m", "HICACHE_RATIO": "nan"}, "HICACHE_RATIO='nan'"),
        ({"MODEL": "m", "HICACHE_SIZE": "8"}, "HICACHE_SIZE is no setting"),
        ({"MODEL": "m", "TP": "two"}, "TP='two'"),
        ({"MODEL": "m", "PORT": "70000"}, "PORT=70000"),
        ({"MODEL": "m", "CODEC": "int8"}, "is called HIQCACHE_CODEC"),
        ({"MODEL": "m", "HIQCACHE_CODEC": "int3"}, "int8"),
        ({"MODEL": "m", "HIQCACHE_CODECS": "int8"}, "HIQCACHE_CODEC?"),
        ({"MODEL": "m", "SGLANG_ARGS": "--hicache-size=8"}, "use HICACHE_GB"),
        ({"MODEL": "m", "SGLANG_ARGS": "--tp 2"}, "use TP"),
        ({"MODEL": "m", "SGLANG_ARGS": "--hicache-siz 8"}, "(short for --hicache-size)"),
        ({"MODEL": "m", "SGLANG_ARGS": "--max-total=9"}, "use MAX_TOTAL_TOKENS"),
        ({"MODEL": "m", "SGLANG_ARGS": "'open"}, "SGLANG_ARGS"),
        ({"MODEL": "/models/absent"}, "MODEL_DIR="),
        ({"MODEL": __file__}, "no such folder"),
        ({"MODEL": "m", "HICACHE_GB": "8", "HICACHE_RATIO": "2"}, "leave that empty"),
    ],
)
def test_it_refuses_what_is_unknown_or_contradictory(variables: dict[str, str], named: str) -> None:
    done = run(**variables)
    assert done.returncode == 2, done.stderr
    assert named in done.stderr


def test_it_takes_no_arguments_but_doctor() -> None:
    done = run("--tp", "2", MODEL="m")
    assert done.returncode == 2
    assert "SGLANG_ARGS" in done.stderr


def test_settings_that_cannot_be_read_are_not_printed() -> None:
    done = run(MODEL="m", SGLANG_ARGS="--api-key hidden 'open")
    assert done.returncode == 2
    assert "hidden" not in done.stderr


def refused_here(
    entrypoint: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    **variables: str,
) -> str:
    """What the entry point says as it ends, in this process, which has loaded SGLang already."""
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **variables})
    with pytest.raises(SystemExit) as ended:
        entrypoint.main(argv)
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("on_the_hub", [True, False])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_it_refuses_an_l2_that_does_not_fit_the_memory(
    entrypoint: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    on_the_hub: bool,
    codec: str,
) -> None:
    model = "Qwen/Qwen3-8B" if on_the_hub else str(write(tmp_path, QWEN3_8B))
    given = {"MODEL": model, "HIQCACHE_CODEC": codec, "HICACHE_GB": "100000"}
    said = refused_here(entrypoint, monkeypatch, capsys, [], **given)
    assert "L2 takes 100000.00 GB" in said
    assert "lower HICACHE_GB, or raise" in said
    assert "GPU_SERVER_MEMORY" in said


def test_a_ratio_that_does_not_fit_is_advised_to_lower_what_is_set(
    entrypoint: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {"MODEL": str(write(tmp_path, QWEN3_8B)), "HIQCACHE_CODEC": "int8"}
    given |= {"HICACHE_RATIO": "3", "MAX_TOTAL_TOKENS": str(10**9)}
    said = refused_here(entrypoint, monkeypatch, capsys, [], **given)
    assert f"L2 takes {3 * 147_456:.2f} GB" in said
    assert "lower HICACHE_RATIO or MAX_TOTAL_TOKENS, or raise" in said
    assert "HICACHE_GB" not in said


def test_the_doctor_hears_what_the_pool_is_planned_of(
    entrypoint: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.extend(command))
    given = {"MODEL": str(write(tmp_path, QWEN3_8B)), "HIQCACHE_CODEC": "int4", "TP": "2"}
    given |= {"SGLANG_PLATFORM": "hiqcache_cpu", "HICACHE_GB": "1"}
    given |= {"SGLANG_ARGS": "--page-size 64 --pp-size 2 --kv-cache-dtype fp8_e4m3"}
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **given})
    entrypoint.main(["doctor"])
    model = ["--model", str(tmp_path), "--kv-cache-dtype", "fp8_e4m3", "--tp", "2", "--ranks", "4"]
    pool = ["--host-gb", "1.0", "--page-size", "64"]
    assert started[1:] == ["-m", "hiqcache.cli", "doctor", *model, *pool]


def test_the_doctor_of_a_model_on_the_hub_refuses_it_too(
    entrypoint: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"MODEL": "Qwen/Qwen3-8B", "HIQCACHE_CODEC": "int8", "HICACHE_GB": "100000"}
    said = refused_here(entrypoint, monkeypatch, capsys, ["doctor"], **given)
    assert "L2 takes 100000.00 GB" in said


def test_tp_above_the_visible_gpus_is_refused(entrypoint: ModuleType, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert entrypoint.visible_gpus(tmp_path) == 2
    entrypoint.check_gpus(2, 2)
    with pytest.raises(entrypoint.ConfigurationError, match=r"sees 2: lower.*GPU_COUNT=4"):
        entrypoint.check_gpus(4, 2)
    # WSL and other places without such files: SGLang will tell.
    assert entrypoint.visible_gpus(tmp_path / "absent") == 0
    entrypoint.check_gpus(4, 0)


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ("", 16),
        ("--nnodes 2", 8),
        ("--nnodes=4 --x", 4),
        ("--pp-size 2", 32),
        ("--pipeline-parallel 2 --nnodes 4", 8),
        ("--dp-size 2", 32),
        ("--enable-dp-attention --dp-size 2", 16),
        ("--attn-dp-size 2", 16),
    ],
)
def test_ranks_are_those_of_one_host(entrypoint: ModuleType, more: str, ranks: int) -> None:
    read = entrypoint.Configuration.from_env
    assert read({"MODEL": "m", "TP": "16", "SGLANG_ARGS": more}).ranks == ranks


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--nnodes 2 --dist-init-addr 127.0.0.1:9",
        "--pp-size 2",
        "--pp-size=4 --nnodes=2 --dist-init-addr 127.0.0.1:9",
        "--dp-size 2",
        "--data-parallel 3 --pipeline-parallel 2",
        "--enable-dp-attention --dp-size 2",
        "--attn-dp-size 2",
    ],
)
def test_ranks_are_counted_as_sglang_counts_them(
    entrypoint: ModuleType, more: str, tmp_path: Path
) -> None:
    given = {"MODEL": str(write(tmp_path, QWEN3_8B)), "TP": "8", "SGLANG_PLATFORM": "hiqcache_cpu"}
    read = entrypoint.Configuration.from_env({**given, "SGLANG_ARGS": more})
    assert read.ranks == apart(ranks_of_a_host, read.arguments())


def test_keys_stay_out_of_the_log(entrypoint: ModuleType) -> None:
    given = [
        *("--api-key", "one", "--admin-api-key=two", "--ssl-keyfile-password", "three"),
        # As SGLang's parser takes them, too.
        *("--api-ke", "four", "--admin=five", "--hicache-storage-backend-extra", "{six}"),
        *("--hicache-storage-backend", "file", "--ssl-keyfile", "k.pem", "--tp-size", "2"),
    ]
    assert entrypoint.masked(given) == (
        "--api-key '***' '--admin-api-key=***' --ssl-keyfile-password '***' "
        "--api-ke '***' '--admin=***' --hicache-storage-backend-extra '***' "
        "--hicache-storage-backend file --ssl-keyfile k.pem --tp-size 2"
    )


def test_flags_are_those_of_sglangs_parser(entrypoint: ModuleType) -> None:
    """Every name that sets what a variable sets, every flag for a key, and nothing else."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    options = {flag for action in parser._actions for flag in action.option_strings}
    assert set(entrypoint.SECRETS) <= options
    assert {*entrypoint.PIPELINE_PARALLEL, *entrypoint.DATA_PARALLEL} <= options
    keys = {flag for flag in options if flag.endswith(("-key", "-password", "-secret"))}
    assert keys <= set(entrypoint.SECRETS)
    for action in parser._actions:
        names = set(action.option_strings)
        assert names <= set(entrypoint.OWNED) or not names & set(entrypoint.OWNED), names
    # A flag of SGLang that begins another's name is itself: no variable's, and no key's.
    begins = {
        flag
        for flag in options - set(entrypoint.SECRETS)
        if any(secret.startswith(flag) for secret in entrypoint.SECRETS)
    }
    assert begins == set(entrypoint.NO_SECRETS)
    for flag in options - set(entrypoint.OWNED):
        assert not any(owned.startswith(flag) for owned in entrypoint.OWNED), flag


def test_sglang_gets_the_keys_that_the_log_does_not_show(
    entrypoint: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []
    given = {"MODEL": "org/model", "SGLANG_ARGS": "--api-key hidden"}
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(os, "execv", lambda _, command: started.extend(command))
    entrypoint.main([])
    assert started[-2:] == ["--api-key", "hidden"]
    printed = capsys.readouterr()
    assert "--api-key '***'" in printed.out
    assert "hidden" not in printed.out + printed.err


def test_arguments_are_what_the_environment_says(entrypoint: ModuleType) -> None:
    configuration = entrypoint.Configuration.from_env(
        {
            "MODEL": "org/model",
            "HICACHE_GB": "8",
            "TP": "2",
            "MAX_TOTAL_TOKENS": "16384",
            "PORT": "31000",
            "SGLANG_ARGS": "--page-size 64 --chat-template 'a b'",
        }
    )
    arguments = configuration.arguments()
    text = " ".join(arguments)
    for part in (
        "--model-path org/model",
        "--port 31000",
        "--tp-size 2",
        "--hicache-size 8",
        "--max-total-tokens 16384",
        "--enable-hierarchical-cache",
        "--enable-metrics",
        "--page-size 64",
    ):
        assert part in text
    assert arguments[-1] == "a b"
    assert "--hicache-ratio" not in text
    assert "--device" not in text


def test_cpu_arguments_are_those_of_the_load_tests(entrypoint: ModuleType) -> None:
    assert entrypoint.CPU_ARGS == CPU_ARGS
    configuration = entrypoint.Configuration.from_env(
        {"MODEL": "m", "SGLANG_PLATFORM": "hiqcache_cpu"}
    )
    assert configuration.arguments()[-len(CPU_ARGS) :] == list(CPU_ARGS)


def test_planned_bytes_follow_the_ratio_or_the_size(entrypoint: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, QWEN3_8B)
    read, stock = entrypoint.Configuration.from_env, Settings()
    by_size = read({"MODEL": str(tmp_path), "HICACHE_GB": "8"})
    model = entrypoint.model_of(by_size, Settings("int8"))
    assert model.geometry.stock_bytes_per_token == 147_456
    assert by_size.host_gigabytes(model, stock) == 8
    by_ratio = read({"MODEL": str(tmp_path), "HICACHE_RATIO": "3", "MAX_TOTAL_TOKENS": "1000"})
    assert by_ratio.host_gigabytes(model, stock) == pytest.approx(3 * 1000 * 147_456 / 1e9)
    assert by_ratio.host_gigabytes(None, stock) is None
    on_the_hub = read({"MODEL": "org/model", "HICACHE_GB": "8"})
    assert entrypoint.model_of(on_the_hub, Settings("int8")) is None
    assert on_the_hub.host_gigabytes(None, stock) == 8


def test_neither_a_size_nor_a_ratio_is_left_to_sglang(
    entrypoint: ModuleType, tmp_path: Path
) -> None:
    """SGLang then shrinks L2 until it fits: there is nothing to refuse."""
    write(tmp_path, QWEN3_8B)
    given = {"MODEL": str(tmp_path), "MAX_TOTAL_TOKENS": str(10**12)}
    configuration = entrypoint.Configuration.from_env(given)
    model = entrypoint.model_of(configuration, Settings("int8"))
    assert configuration.host_gigabytes(model, Settings("int8")) is None


@pytest.mark.parametrize(
    ("settings", "bytes_per_token"),
    [
        (Settings("int8", sizing="bytes"), 147_456),
        (Settings("int8", sizing="tokens"), 74_880),
        (Settings("int8", "mover", "tokens"), 82_944),
        (Settings("bf16", sizing="tokens"), 147_456),
    ],
    ids=str,
)
def test_a_ratio_counts_the_bytes_that_the_sizing_gives(
    entrypoint: ModuleType, tmp_path: Path, settings: Settings, bytes_per_token: int
) -> None:
    given = {"MODEL": str(write(tmp_path, QWEN3_8B)), "HICACHE_RATIO": "2"}
    given |= {"MAX_TOTAL_TOKENS": "64000", "SGLANG_ARGS": "--page-siz=64"}
    configuration = entrypoint.Configuration.from_env(given)
    assert configuration.page_size == 64
    model = entrypoint.model_of(configuration, settings)
    expected = 128_000 * bytes_per_token / 1e9
    assert configuration.host_gigabytes(model, settings) == pytest.approx(expected)


@pytest.mark.parametrize(
    "config", [DEEPSEEK_V3, GPT_OSS_20B, QWEN3_NEXT, MAMBA2, GEMMA3_4B], ids=str
)
def test_the_table_decides_for_a_models_folder(
    entrypoint: ModuleType, tmp_path: Path, config: dict[str, Any]
) -> None:
    write(tmp_path, config)
    configuration = entrypoint.Configuration.from_env({"MODEL": str(tmp_path), "HICACHE_GB": "8"})
    model = entrypoint.model_of(configuration, Settings())
    assert model.family.key
    if model.family.served:
        assert entrypoint.model_of(configuration, Settings("int8")) == model
        return
    with pytest.raises(UnsupportedError, match="Unset HIQCACHE_CODEC") as caught:
        entrypoint.model_of(configuration, Settings("int8"))
    assert model.family.refused in str(caught.value)


def test_k_that_turns_otherwise_is_refused_for_int4_alone(
    entrypoint: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, PHI2)
    configuration = entrypoint.Configuration.from_env({"MODEL": str(tmp_path), "HICACHE_GB": "8"})
    assert entrypoint.model_of(configuration, Settings("int8"))
    with pytest.raises(UnsupportedError, match=r"K of model type 'phi'.*HIQCACHE_CODEC=int8"):
        entrypoint.model_of(configuration, Settings("int4"))


def test_int4_is_taken_at_pages_that_it_stores(entrypoint: ModuleType, tmp_path: Path) -> None:
    given = {"MODEL": str(write(tmp_path, QWEN3_8B)), "HICACHE_GB": "8"}
    configuration = entrypoint.Configuration.from_env({**given, "SGLANG_ARGS": "--page-size 64"})
    assert entrypoint.model_of(configuration, Settings("int4")) is not None
    with pytest.raises(entrypoint.ConfigurationError, match=r"32, 64, 128 .*have 1: use --page"):
        entrypoint.model_of(entrypoint.Configuration.from_env(given), Settings("int4"))


def test_an_fp8_kv_cache_halves_the_bytes_and_takes_int4_alone(
    entrypoint: ModuleType, tmp_path: Path
) -> None:
    given = {"MODEL": str(write(tmp_path, QWEN3_8B)), "HICACHE_RATIO": "2"}
    given |= {"MAX_TOTAL_TOKENS": "64000", "SGLANG_ARGS": "--page-size 64 --kv-cache-dt fp8_e4m3"}
    configuration = entrypoint.Configuration.from_env(given)
    model = entrypoint.model_of(configuration, Settings("int4"))
    found = configuration.host_gigabytes(model, Settings("int4"))
    assert found == pytest.approx(128_000 * 147_456 / 2 / 1e9)
    with pytest.raises(UnsupportedError, match=r"a row of INT8.*HIQCACHE_CODEC=int4"):
        entrypoint.model_of(configuration, Settings("int8"))


def test_a_head_dim_that_the_codec_does_not_serve_is_refused(
    entrypoint: ModuleType, tmp_path: Path
) -> None:
    write(tmp_path, without(QWEN3_8B, head_dim=80))
    configuration = entrypoint.Configuration.from_env({"MODEL": str(tmp_path)})
    assert entrypoint.model_of(configuration, Settings("int8")) is not None
    with pytest.raises(entrypoint.ConfigurationError, match="power of two"):
        entrypoint.model_of(configuration, Settings("int8-rot"))


def test_a_model_that_is_refused_ends_the_container(tmp_path: Path) -> None:
    done = run(MODEL=str(write(tmp_path, MAMBA2)), HICACHE_GB="8", HIQCACHE_CODEC="int8")
    assert done.returncode == 2
    assert "it keeps no K and V" in done.stderr
    assert "Traceback" not in done.stderr


def test_sglang_s_own_requests_take_no_proxy(
    entrypoint: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, command: started.append(command))
    for name, value in (
        *(("MODEL", "some/name"), ("HIQCACHE_CODEC", "bf16"), ("SGLANG_PLATFORM", "hiqcache_cpu")),
        *(("http_proxy", "http://proxy:3128"), ("no_proxy", "intranet"), ("NO_PROXY", "")),
    ):
        monkeypatch.setenv(name, value)
    entrypoint.main([])
    assert "sglang.launch_server" in started[0]
    assert os.environ["no_proxy"] == "intranet,127.0.0.1,localhost,::1"
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"]
