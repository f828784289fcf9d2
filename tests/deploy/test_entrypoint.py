"""The containers' entry point: what it starts, and what it refuses before a model is loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bench.lab.servers import CPU_ARGS

ENTRYPOINT = Path(__file__).parents[2] / "docker" / "entrypoint.py"
QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


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
        env={"PATH": os.environ["PATH"], **variables},
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
        ({"MODEL": "m", "CODEC": "bf16", "HIQCACHE_CODEC": "int8"}, "contradict"),
        ({"MODEL": "m", "CODEC": "int4"}, "int8"),
        ({"MODEL": "m", "HIQCACHE_CODECS": "int8"}, "HIQCACHE_CODEC?"),
        ({"MODEL": "m", "SGLANG_ARGS": "--hicache-size=8"}, "use HICACHE_GB"),
        ({"MODEL": "m", "SGLANG_ARGS": "--tp 2"}, "use TP"),
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


@pytest.mark.parametrize("on_the_hub", [True, False])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_it_refuses_an_l2_that_does_not_fit_the_memory(
    tmp_path: Path, on_the_hub: bool, codec: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    model = "Qwen/Qwen3-8B" if on_the_hub else str(tmp_path)
    done = run(MODEL=model, CODEC=codec, HICACHE_GB="100000")
    assert done.returncode == 2
    assert "L2 takes 100000.00 GB" in done.stderr
    assert "GPU_SERVER_MEMORY" in done.stderr


def test_the_doctor_of_a_model_on_the_hub_refuses_it_too() -> None:
    done = run("doctor", MODEL="Qwen/Qwen3-8B", CODEC="int8", HICACHE_GB="100000")
    assert done.returncode == 2
    assert "L2 takes 100000.00 GB" in done.stderr


def test_tp_above_the_visible_gpus_is_refused(entrypoint: ModuleType, tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert entrypoint.visible_gpus(tmp_path) == 2
    entrypoint.check_gpus(2, 2)
    with pytest.raises(entrypoint.ConfigurationError, match=r"sees 2: set TP=2.*GPU_COUNT=4"):
        entrypoint.check_gpus(4, 2)
    # WSL and other places without such files: SGLang will tell.
    assert entrypoint.visible_gpus(tmp_path / "absent") == 0
    entrypoint.check_gpus(4, 0)


@pytest.mark.parametrize(("more", "ranks"), [("", 16), ("--nnodes 2", 8), ("--nnodes=4 --x", 4)])
def test_ranks_are_those_of_one_host(entrypoint: ModuleType, more: str, ranks: int) -> None:
    read = entrypoint.Configuration.from_env
    assert read({"MODEL": "m", "TP": "16", "SGLANG_ARGS": more}).ranks == ranks


def test_keys_stay_out_of_the_log(entrypoint: ModuleType) -> None:
    given = [
        "--api-key",
        "one",
        "--admin-api-key=two",
        "--ssl-keyfile-password",
        "three",
        "--tp-size",
    ]
    assert entrypoint.masked([*given, "2"]) == (
        "--api-key '***' '--admin-api-key=***' --ssl-keyfile-password '***' --tp-size 2"
    )


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
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    read = entrypoint.Configuration.from_env
    by_size = read({"MODEL": str(tmp_path), "HICACHE_GB": "8"})
    geometry = entrypoint.geometry_of(by_size, True)
    assert geometry.stock_bytes_per_token == 147_456
    assert by_size.host_gigabytes(geometry) == 8
    by_ratio = read({"MODEL": str(tmp_path), "HICACHE_RATIO": "3", "MAX_TOTAL_TOKENS": "1000"})
    assert by_ratio.host_gigabytes(geometry) == pytest.approx(3 * 1000 * 147_456 / 1e9)
    assert by_ratio.host_gigabytes(None) is None
    assert read({"MODEL": str(tmp_path)}).host_gigabytes(geometry) is None
    on_the_hub = read({"MODEL": "org/model", "HICACHE_GB": "8"})
    assert entrypoint.geometry_of(on_the_hub, True) is None
    assert on_the_hub.host_gigabytes(None) == 8


def test_a_model_beyond_plans_is_served_by_the_stock_pool_alone(
    entrypoint: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, "kv_lora_rank": 512}))
    latent = entrypoint.Configuration.from_env({"MODEL": str(tmp_path), "HICACHE_GB": "8"})
    assert entrypoint.geometry_of(latent, False) is None
    done = run(MODEL=str(tmp_path), HICACHE_GB="8", CODEC="int8")
    assert done.returncode == 2
    assert "MLA" in done.stderr


def test_a_hybrid_model_of_a_folder_starts_with_a_warning(
    entrypoint: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {**QWEN3_8B, "layer_types": ["full_attention", "sliding_attention"] * 18}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    hybrid = entrypoint.Configuration.from_env({"MODEL": str(tmp_path), "HICACHE_GB": "8"})
    assert entrypoint.geometry_of(hybrid, True) is None
    assert "warning" in (warned := capsys.readouterr().err)
    assert "sliding_attention" in warned
    # Its size is checked all the same, and what no quantised pool serves is refused.
    done = run(MODEL=str(tmp_path), CODEC="int8", HICACHE_GB="100000")
    assert done.returncode == 2
    assert "L2 takes" in done.stderr
    (tmp_path / "config.json").write_text(json.dumps({**config, "kv_lora_rank": 512}))
    done = run(MODEL=str(tmp_path), CODEC="int8")
    assert done.returncode == 2
    assert "MLA" in done.stderr
