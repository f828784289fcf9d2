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

from loadtest.servers import CPU_ARGS

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


def test_it_refuses_an_l2_that_does_not_fit_the_memory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    done = run(MODEL=str(tmp_path), CODEC="int8", HICACHE_GB="100000")
    assert done.returncode == 2
    assert "L2 takes 100000.00 GB" in done.stderr


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
    assert entrypoint.planned(by_size, True)[1] == 8
    by_ratio = read({"MODEL": str(tmp_path), "HICACHE_RATIO": "3", "MAX_TOTAL_TOKENS": "1000"})
    assert entrypoint.planned(by_ratio, True)[1] == pytest.approx(3 * 1000 * 147_456 / 1e9)
    assert entrypoint.planned(read({"MODEL": str(tmp_path)}), True) is None
    assert entrypoint.planned(read({"MODEL": "org/model", "HICACHE_GB": "8"}), True) is None


def test_a_model_beyond_plans_is_served_by_the_stock_pool_alone(
    entrypoint: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, "kv_lora_rank": 512}))
    latent = entrypoint.Configuration.from_env({"MODEL": str(tmp_path), "HICACHE_GB": "8"})
    assert entrypoint.planned(latent, False) is None
    done = run(MODEL=str(tmp_path), HICACHE_GB="8", CODEC="int8")
    assert done.returncode == 2
    assert "MLA" in done.stderr
