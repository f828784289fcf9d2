"""`hiqcache plan` as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hiqcache.cli import main
from hiqcache.compatibility import FAMILIES
from hiqcache.geometry import KVGeometry
from hiqcache.model import HostPool, Model
from hiqcache.plan import plan
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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path, QWEN3_8B)


def test_plan_prints_the_published_capacities(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), "--host-gb", "8", "--page-size", "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["bf16", "stock", "147,456", "54,254", "1.000x"] in lines
    assert ["int8", "fused", "74,880", "106,838", "1.969x"] in lines
    assert ["int8-rot", "fused", "74,880", "106,838", "1.969x"] in lines
    assert ["int8", "mover", "82,944", "96,451", "1.778x"] in lines


def test_plan_behind_an_fp8_kv_cache(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = ("--kv-cache-dtype", "fp8_e4m3")
    assert main(["plan", "--model", str(model), "--host-gb", "8", *fp8]) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert ["bf16", "stock", "73,728", "108,544", "1.000x"] in lines
    assert ["int4", "dma", "41,526", "192,704", "1.775x"] in lines
    assert "int8      fused     not served: rows of float8_e4m3fn: a row of INT8 takes" in printed


def test_pages_are_those_that_sglang_recommends(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), "--host-gb", "8"]) == 0
    printed = capsys.readouterr().out
    assert "pages of 64 (--page-size; SGLang recommends 64 on a GPU)" in printed
    assert "54,272" in printed  # whole pages, and one more: 848 of 64


def test_plan_json_for_two_ranks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", str(model), "--host-gb", "8", "--tp", "2", "--json"]
    assert main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["family"] == "plain"
    assert document["pools"][0]["parts"][0] == {"name": "k", "heads": 4, "width": 128}
    assert [row["bytes_per_token"] for row in document["rows"]][:2] == [73_728, 37_440]


def test_plan_serves_gemma_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its windows are in SGLang's plain pool; its heads are its class's defaults."""
    assert main(["plan", "--model", str(write(tmp_path, GEMMA3_4B)), "--host-gb", "8"]) == 0
    printed = capsys.readouterr().out
    assert "34 layers of k 4 x 256, v 4 x 256" in printed
    assert ["int8", "fused"] in [line.split()[:2] for line in printed.splitlines()]
    assert "not served" not in printed


def test_plan_says_which_codec_does_not_serve_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, without(QWEN3_8B, head_dim=80))
    assert main(["plan", "--model", str(tmp_path), "--host-gb", "8"]) == 0
    assert "power of two" in capsys.readouterr().out


@pytest.mark.parametrize("config", [DEEPSEEK_V3, GPT_OSS_20B, QWEN3_NEXT], ids=str)
def test_plan_says_what_the_table_says_of_a_family(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model", str(write(tmp_path, config)), "--host-gb", "8"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    family = FAMILIES[document["family"]]
    assert family.name in printed
    quantised = [row for row in document["rows"] if row["codec"] != "bf16"]
    assert quantised
    # All of a refused family's rows, and of a served one those of its own codecs and transfers.
    refused = {row["refused"] for row in quantised}
    reason = f"{family.name}: {family.refused}"
    assert (refused == {reason}) if family.refused else ("" in refused)
    if family.refused:
        assert f"not served: {reason}" in printed


def test_int4_is_planned_for_k_that_turns_by_halves_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(write(tmp_path, PHI2)), "--host-gb", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (four,) = [line for line in lines if line.startswith("int4")]
    assert "not served: K of model type 'phi': int4 stores" in four
    assert not any("not served" in line for line in lines if line != four)


def test_plan_says_the_factor_of_latent_rows_and_that_the_mover_does_not_move_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(write(tmp_path, DEEPSEEK_V3)), "--host-gb", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(
        line.endswith("1.966x") for line in lines if line.startswith("int8") and " fused " in line
    )
    (four,) = [line for line in lines if line.startswith("int4")]
    assert "not served: codec int4 stores K and V each in its own way" in four
    (mover,) = [line for line in lines if " mover " in line]
    assert "not served: transfer mover copies records of one size" in mover


def test_plan_shares_the_bytes_as_sglang_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--host-gb", "9", "--json", "--model"]
    hybrids = {name: tmp_path / name for name in ("windows", "state")}  # SGLang caches by folder
    for folder in hybrids.values():
        folder.mkdir()
    assert main([*arguments, str(write(hybrids["windows"], GPT_OSS_20B))]) == 0
    full, swa = json.loads(capsys.readouterr().out)["pools"]
    assert (full["gigabytes"], swa["gigabytes"]) == pytest.approx((5, 4))  # 1 to 0.8
    assert main([*arguments, str(write(hybrids["state"], QWEN3_NEXT))]) == 0
    (kv,) = json.loads(capsys.readouterr().out)["pools"]
    assert kv["gigabytes"] == pytest.approx(9 / 1.9)  # 1 to 0.9 of state


@pytest.mark.parametrize(
    ("pools", "state", "gain"),
    [
        ((HostPool("kv", KVGeometry.of_heads(12, 2, 256)),), 0.0, 24_576 / 12_384),
        # State stays as it is, and grows with the rest: a prefix is of use with both.
        ((HostPool("kv", KVGeometry.of_heads(12, 2, 256)),), 0.9, 1.9 / (12_384 / 24_576 + 0.9)),
        (
            (
                HostPool("full", KVGeometry.of_heads(12, 8, 64)),
                HostPool("swa", KVGeometry.of_heads(24, 4, 128), 0.8),
            ),
            0.0,
            (24_576 + 0.8 * 49_152) / (12_672 + 0.8 * 24_960),
        ),
    ],
    ids=["plain", "state", "windows"],
)
def test_all_pools_of_a_model_grow_by_one_factor_within_the_same_bytes(
    pools: tuple[HostPool, ...], state: float, gain: float
) -> None:
    served = replace(FAMILIES["sliding"], refused="")
    model = Model(Path("model"), served, pools, "a test", state_share=state)
    rows = [row for row in plan(model, 50) if row.codec == "int8" and row.transfer == "fused"]
    assert [row.pool for row in rows] == [pool.label for pool in pools]
    assert [row.gain for row in rows] == pytest.approx([gain] * len(rows), rel=1e-3)
    taken = sum(row.tokens * row.bytes_per_token for row in rows) / 1e9
    states = 50 * state / (1 + state) * gain
    assert taken + states == pytest.approx(50, rel=1e-3)


def test_sglang_shares_as_the_plan_says() -> None:
    """The split, and the ratios that it rests on, are SGLang's."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _split_hicache_size
    from sglang.srt.server_args import ServerArgs

    from hiqcache.sglang.model_config import STATE_BYTES, SWA_TOKENS

    resolved = ServerArgs(model_path="none").resolved_dict()
    assert resolved["swa_full_tokens_ratio"] == SWA_TOKENS
    assert resolved["mamba_full_memory_ratio"] == STATE_BYTES
    pools = tuple(SimpleNamespace(host_capacity_bytes=size) for size in (10, 8))
    assert _split_hicache_size(9, pools) == pytest.approx((5, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host-gb", "0"], "must be positive"),
        (["--host-gb", "8", "--page-size", "0"], "at least 1"),
        (["--host-gb", "8", "--tp", "3"], "cannot be split"),
        (["--host-gb", "8", "--page-size", "-1"], "at least 1"),
    ],
)
def test_plan_refuses_with_a_reason(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(model), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_model_without_kv_rows_is_said_to_have_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(write(tmp_path, MAMBA2)), "--host-gb", "8"]) == 2
    assert "it keeps no K and V" in capsys.readouterr().err


def test_plan_needs_neither_torch_nor_sglang_and_says_what_it_rests_on(model: Path) -> None:
    code = (
        "import sys, importlib.util as util\n"
        "sys.modules.update(torch=None, sglang=None, transformers=None)\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'sglang' else find(name, *rest)\n"
        "from hiqcache.cli import main\n"
        f"sys.exit(main(['plan', '--model', {str(model)!r}, '--host-gb', '8']))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "note: This Python has no SGLang" in done.stdout
    assert "note: Read from config.json's keys alone." in done.stdout
    assert "1.969x" in done.stdout
