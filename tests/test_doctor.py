"""`hiqcache doctor` as a person runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from hiqcache.cli import main
from hiqcache.compatibility import FAMILIES
from hiqcache.doctor import diagnose
from hiqcache.features import FEATURES
from hiqcache.sglang import host_memory, model_config
from hiqcache.sglang.host_memory import memory_left, reserve_bytes
from tests.model_folders import OF_FAMILY, PHI2, QWEN3_8B, write


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path, QWEN3_8B)


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The installed command, in a process of its own."""
    command = [sys.executable, "-m", "hiqcache.cli", *arguments]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much memory as any test's pool takes, whatever else this machine is doing."""
    monkeypatch.setattr(host_memory, "memory_left", lambda: (10**13, "of the test's"))


@pytest.mark.usefixtures("roomy")
def test_doctor_is_content_with_this_environment(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "hiqcache_cpu")
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    status = main(["doctor", "--model", str(model), "--host-gb", "0.1"])
    printed = capsys.readouterr().out
    assert "FIX" not in printed
    assert status == 0
    assert "ok   SGLang: 0.5.23" in printed
    assert "ok   plug-in: seen by SGLang, with hiqcache" in printed
    assert "ok   contract: " in printed
    assert "ok   model: Plain attention (MHA, GQA, MQA), read from SGLang 0.5.23's" in printed
    assert "74,880 B per token" in printed
    assert "ok   memory: 10000.00 GB left (of the test's)" in printed


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"HIQCACHE_CODEC": "int7"}, "FIX  settings: HIQCACHE_CODEC='int7'"),
        ({"SGLANG_PLUGINS": "other"}, "FIX  plug-in: SGLANG_PLUGINS='other' leaves HiQCache out"),
        ({"SGLANG_PLUGINS": ","}, "FIX  plug-in: SGLANG_PLUGINS=',' leaves HiQCache out"),
        ({"SGLANG_PLUGINS": " "}, "FIX  plug-in: SGLANG_PLUGINS=' ' leaves HiQCache out"),
        ({"SGLANG_PLATFORM": "vendor"}, "FIX  plug-in: SGLANG_PLATFORM=vendor makes SGLang skip"),
        ({"HIQCACHE_CODEC": "int8", "HIQCACHE_TRANSFER": "fused"}, "HIQCACHE_TRANSFER=fused needs"),
    ],
)
def test_doctor_finds_what_would_stop_a_start(
    env: dict[str, str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "fused" in env.values():
        import torch

        if torch.cuda.is_available():
            pytest.skip("fused is served here: this machine has a GPU")
    for name, value in {"SGLANG_PLATFORM": "hiqcache_cpu", **env}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor"]) == 1
    assert message in capsys.readouterr().out


def test_doctor_names_both_versions_of_sglang(tmp_path: Path) -> None:
    other = tmp_path / "sglang-0.5.99.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.99\n")
    done = run("doctor", SGLANG_PLATFORM="hiqcache_cpu", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "FIX  SGLang: 0.5.99; HiQCache uses internals of 0.5.23" in done.stdout
    assert "HIQCACHE_ALLOW_SGLANG=0.5.99 serves it untested" in done.stdout


def test_doctor_names_a_seam_that_moved(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hiqcache.sglang.source import Source

    installed = Source.installed()
    assert installed is not None

    def read(path: str) -> str | None:
        text = installed.read(path)
        return None if text is None else text.replace("def evict_host(", "def drop_host(")

    monkeypatch.setattr(Source, "installed", lambda: Source("0.5.23", read))
    monkeypatch.setenv("SGLANG_PLATFORM", "hiqcache_cpu")
    assert main(["doctor"]) == 1
    assert (
        "FIX  contract: sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.evict_host"
        in (capsys.readouterr().out)
    )


@pytest.mark.parametrize("short", [0, 1])
def test_doctor_refuses_a_pool_larger_than_what_is_left(
    short: int, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two ranks, and of what SGLang keeps free: a byte less is too little."""
    monkeypatch.setenv("SGLANG_PLATFORM", "hiqcache_cpu")
    left = 2 * 3 * 10**9 + reserve_bytes() - short
    monkeypatch.setattr(host_memory, "memory_left", lambda: (left, "of the test's"))
    arguments = ["doctor", "--model", str(model), "--host-gb", "3", "--tp", "2"]
    assert main(arguments) == short
    assert f"{'FIX' if short else 'ok '}  memory: " in capsys.readouterr().out


def test_doctor_reads_this_machines_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "hiqcache_cpu")
    assert main(["doctor", "--model", str(model), "--host-gb", "100000"]) == 1
    assert "FIX  memory:" in capsys.readouterr().out


PLUGINS = (None, "", ",", " ", "hiqcache", "x, hiqcache ,y", "other")
PLATFORMS = (None, "", " ", "hiqcache_cpu", "HIQCACHE_CPU", "vendor")


@pytest.mark.parametrize(
    ("plugins", "platform"),
    [*((name, "hiqcache_cpu") for name in PLUGINS), *((None, name) for name in PLATFORMS)],
)
def test_doctor_and_sglangs_loader_agree_on_what_is_loaded(
    plugins: str | None, platform: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.plugins import (
        GENERAL_PLUGINS_GROUP,
        _get_excluded_dists,
        load_plugins_by_group,
    )

    for name, given in (("SGLANG_PLUGINS", plugins), ("SGLANG_PLATFORM", platform)):
        monkeypatch.delenv(name, raising=False)
        if given is not None:
            monkeypatch.setenv(name, given)
    # As its load_plugins does in each process of a server.
    loaded = load_plugins_by_group(GENERAL_PLUGINS_GROUP, excluded_dists=_get_excluded_dists())
    (check,) = (check for check in diagnose(None) if check.name == "plug-in")
    assert check.ok == ("hiqcache" in loaded)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("config", "codec", "reason"),
    [
        (PHI2, "int8", ""),
        (PHI2, "int4", FEATURES["rotary"].refused),
        (QWEN3_8B, "int4", ""),
        *((config, "bf16", "") for config, _ in OF_FAMILY.values()),
        *((config, "int8", FAMILIES[key].refused) for key, (config, _) in OF_FAMILY.items()),
    ],
    ids=[
        *("phi-int8", "phi-int4", "qwen3-int4"),
        *(f"{key}-bf16" for key in OF_FAMILY),
        *(f"{key}-int8" for key in OF_FAMILY),
    ],
)
def test_doctor_refuses_what_the_table_refuses(
    config: Mapping[str, Any],
    codec: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "hiqcache_cpu")
    monkeypatch.setenv("HIQCACHE_CODEC", codec)
    arguments = ["doctor", "--model", str(write(tmp_path, config)), "--host-gb", "0.1"]
    assert main(arguments) == bool(reason)
    printed = capsys.readouterr().out
    assert reason in printed
    assert printed.count("FIX") == bool(reason)


@pytest.mark.usefixtures("roomy")
@pytest.mark.parametrize(
    ("key", "lines"),
    [
        # Layers times K and V of a byte an element, and two of scale a head.
        ("sliding", {"full": 12 * 2 * 8 * (64 + 2), "swa": 12 * 2 * 8 * (64 + 2)}),
        ("linear", {"kv": 12 * 2 * 2 * (256 + 2)}),
        ("dsa", {"kv": 78 * (512 + 64 + 5 * 2)}),
        ("linear_mla", {"kv": 512 + 64 + 5 * 2}),
        ("state", {}),
    ],
)
def test_doctor_says_each_pool_of_a_hybrid_once_it_is_served(
    key: str,
    lines: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served = {name: replace(family, refused="") for name, family in FAMILIES.items()}
    monkeypatch.setattr(model_config, "FAMILIES", MappingProxyType(served))
    monkeypatch.setenv("SGLANG_PLATFORM", "hiqcache_cpu")
    monkeypatch.setenv("HIQCACHE_CODEC", "int8")
    write(tmp_path, OF_FAMILY[key][0])
    given = ["--host-gb", "0.1", "--page-size", "64"]
    assert main(["doctor", "--model", str(tmp_path), *given]) == 0
    printed = capsys.readouterr().out
    assert printed.count("codec: int8, pool") == len(lines)
    for pool, size in lines.items():
        assert f"ok   codec: int8, pool {pool}: {size:,} B per token where" in printed


def test_memory_left_is_sglangs_own_reading_of_nested_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit above this process' own group, as systemd and Slurm set it, is heeded."""
    from sglang.srt.mem_cache import host_memory

    own = tmp_path / "cgroup/slice/job/step"
    own.mkdir(parents=True)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/cgroup").write_text("0::/slice/job/step\n")
    mount = f"30 1 0:26 / {tmp_path}/cgroup rw - cgroup2 cgroup2 rw\n"
    (tmp_path / "self/mountinfo").write_text(mount)
    for group in (own, own.parent, own.parent.parent):
        (group / "memory.max").write_text("max\n")
        (group / "memory.high").write_text("max\n")
        (group / "memory.current").write_text("700\n")
        (group / "memory.stat").write_text("active_file 100\ninactive_file 200\n")
        (group / "memory.min").write_text("0\n")
    headroom = host_memory._cgroup_memory_headroom
    monkeypatch.setattr(host_memory, "_cgroup_memory_headroom", lambda: headroom(tmp_path))
    assert memory_left()[1] == "of the machine's memory"
    (own.parent / "memory.max").write_text("1000000\n")
    left, source = memory_left()
    assert left == 999_600
    assert source.startswith("under a cgroup's limit; the machine has ")


def test_the_reserve_is_the_one_that_sglang_documents() -> None:
    assert reserve_bytes() == 10 * 1024**3


def test_doctor_counts_the_ranks_of_this_host(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "hiqcache_cpu")
    arguments = ["doctor", "--model", str(model), "--host-gb", "100000", "--tp", "8"]
    assert main([*arguments, "--ranks", "4"]) == 1
    assert "the pool's 400000.00 GB" in capsys.readouterr().out
    assert main(arguments) == 1
    assert "the pool's 800000.00 GB" in capsys.readouterr().out
    assert main([*arguments, "--ranks", "0"]) == 2


def test_half_a_pool_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--host-gb", "8"]) == 2
    assert "go together" in capsys.readouterr().err
