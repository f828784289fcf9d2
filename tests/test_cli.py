"""`hiqcache plan` and `hiqcache doctor` as a person runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hiqcache.cli import main
from hiqcache.doctor import memory_left

CONFIG = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The installed command, in a process of its own."""
    command = [sys.executable, "-m", "hiqcache.cli", *arguments]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


def test_plan_prints_the_published_capacities(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), "--host-gb", "8"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bf16", "stock", "147,456", "54,254", "1.000x"] in lines
    assert ["int8", "fused", "74,880", "106,838", "1.969x"] in lines
    assert ["int8-rot", "fused", "74,880", "106,838", "1.969x"] in lines
    assert ["int8", "mover", "82,944", "96,451", "1.778x"] in lines


def test_plan_json_for_two_ranks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", str(model), "--host-gb", "8", "--tp", "2", "--json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["geometry"]["heads"] == 4
    assert [row["bytes_per_token"] for row in document["rows"]][:2] == [73_728, 37_504]


def test_plan_says_which_codec_does_not_serve_the_model(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "head_dim": 80}))
    assert main(["plan", "--model", str(model), "--host-gb", "8"]) == 0
    assert "power of two" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host-gb", "0"], "must be positive"),
        (["--host-gb", "8", "--page-size", "0"], "at least 1"),
        (["--host-gb", "8", "--tp", "3"], "cannot be split"),
    ],
)
def test_plan_refuses_with_a_reason(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_plan_needs_no_torch(model: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from hiqcache.cli import main\n"
        f"sys.exit(main(['plan', '--model', {str(model)!r}, '--host-gb', '8']))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_doctor_is_content_with_this_environment(model: Path) -> None:
    done = run(
        *("doctor", "--model", str(model), "--host-gb", "0.1"),
        SGLANG_PLATFORM="hiqcache_cpu",
        HIQCACHE_CODEC="int8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok   SGLang: 0.5.23" in done.stdout
    assert "ok   plug-in: seen by SGLang, with hiqcache" in done.stdout
    assert "74,880 B a token" in done.stdout
    assert "FIX" not in done.stdout


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"HIQCACHE_CODEC": "int7"}, "FIX  settings: HIQCACHE_CODEC='int7'"),
        ({"SGLANG_PLUGINS": "other"}, "FIX  plug-in: SGLANG_PLUGINS=other leaves HiQCache out"),
        ({"SGLANG_PLATFORM": "vendor"}, "FIX  plug-in: SGLANG_PLATFORM=vendor makes SGLang skip"),
        ({"HIQCACHE_CODEC": "int8", "HIQCACHE_TRANSFER": "fused"}, "HIQCACHE_TRANSFER=fused needs"),
    ],
)
def test_doctor_finds_what_would_stop_a_start(env: dict[str, str], message: str) -> None:
    if "fused" in env.values():
        import torch

        if torch.cuda.is_available():
            pytest.skip("fused is served here: this machine has a GPU")
    done = run("doctor", **{"SGLANG_PLATFORM": "hiqcache_cpu", **env})
    assert done.returncode == 1
    assert message in done.stdout


def test_doctor_names_both_versions_of_sglang(tmp_path: Path) -> None:
    other = tmp_path / "sglang-0.5.99.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    done = run("doctor", SGLANG_PLATFORM="hiqcache_cpu", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "FIX  SGLang: 0.5.99; HiQCache uses internals of 0.5.23" in done.stdout


def test_doctor_refuses_a_pool_larger_than_memory(model: Path) -> None:
    done = run(
        *("doctor", "--model", str(model), "--host-gb", "100000"), SGLANG_PLATFORM="hiqcache_cpu"
    )
    assert done.returncode == 1
    assert "FIX  memory:" in done.stdout


def test_memory_left_heeds_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   2000000 kB\n")
    assert memory_left(tmp_path) == (2_048_000_000, "of the machine's memory")
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("700\n")
    (group / "memory.stat").write_text("anon 400\nactive_file 100\ninactive_file 200\n")
    assert memory_left(tmp_path)[0] == 2_048_000_000
    (group / "memory.max").write_text("1000000\n")
    left, source = memory_left(tmp_path)
    assert left == 999_600
    assert "memory.max" in source


def test_half_a_pool_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--host-gb", "8"]) == 2
    assert "go together" in capsys.readouterr().err
