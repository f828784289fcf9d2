"""L3 of a bench: its cap, what lies in an arm's folder, and what makes a run invalid."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.lab.arms import arm_named, arms_named
from bench.lab.shapes import QWEN3_8B
from bench.lab.shards import Shards
from bench.tiers import report
from bench.tiers.disk import Disk, Held, emptied, held
from bench.tiers.measure import Bench
from bench.tiers.plan import CPU, GPU, Experiment, Scale, experiment
from bench.tiers.summaries import summarise
from hiqcache.storage.seal import SEAL_BYTES

ARMS = tuple(arms_named("bf16,int8"))
SMALL = replace(CPU, shares=(), prefixes=(), shards=Shards(64))


def l3(scale: Scale) -> Experiment:
    return experiment("l3", ARMS, scale, QWEN3_8B, repeats=1)


@pytest.mark.parametrize("scale", [GPU, SMALL], ids=["gpu", "cpu"])
def test_the_working_set_fills_both_disks_and_int8_s_holds_nearly_all_of_it(scale: Scale) -> None:
    plan = l3(scale)
    (point,) = plan.points
    stock, quantised = (plan.disk_tokens(arm, QWEN3_8B) for arm in ARMS)
    working_set = point.groups * point.prefix
    assert quantised < working_set < 1.05 * quantised
    assert 1.9 < quantised / stock < 2
    # What either L2 holds, which is the same bytes, decides little.
    for arm in ARMS:
        assert plan.capacity(arm, QWEN3_8B) < 0.5 * working_set
    # A seal behind each of int8's pages, and nothing behind BF16's.
    page = scale.page_size
    int8, stock_page = (plan.bytes_per_token(arm, QWEN3_8B) * page for arm in ARMS[::-1])
    assert int8 >= ARMS[1].bytes_per_token(QWEN3_8B, page) * page + SEAL_BYTES
    assert stock_page == QWEN3_8B.stock_bytes_per_token * page
    # SGLang refuses an L2 that is not larger than L1.
    assert plan.capacity(ARMS[0], QWEN3_8B) > plan.l1_tokens


def test_pages_that_make_too_many_files_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of 1 are too small for that: give --page-size 64"):
        l3(CPU)


def test_each_arm_has_the_cap_in_a_folder_of_its_own(tmp_path: Path) -> None:
    plan = l3(SMALL)
    bench = Bench(tmp_path, QWEN3_8B, SMALL, True, (), tmp_path, tmp_path / "nvme")
    folders = set()
    for arm in ARMS:
        command = bench.server(plan, arm).command()
        assert command[command.index("--hicache-storage-backend") + 1] == "file"
        given = command[command.index("--hicache-storage-backend-extra-config") + 1]
        more = json.loads(given)
        assert plan.disk is not None
        assert more["max_size"] == plan.disk.nbytes
        folders.add(more["file_storage_path"])
    assert len(folders) == 2
    assert all(Path(folder).is_relative_to(tmp_path / "nvme") for folder in folders)


def test_without_l3_nothing_is_said_of_storage(tmp_path: Path) -> None:
    plan = experiment("same-bytes", ARMS, SMALL, QWEN3_8B, repeats=1)
    bench = Bench(tmp_path, QWEN3_8B, SMALL, True, (), tmp_path)
    assert not any("storage" in given for given in bench.server(plan, ARMS[0]).command())


def test_pages_on_disk_are_counted_and_removed_with_their_folder(tmp_path: Path) -> None:
    folder, beside = tmp_path / "bf16", tmp_path / "other"
    for each in (folder, beside):
        each.mkdir()
        (each / "stale.bin").write_bytes(b"1")
    with emptied(folder):
        assert not folder.exists()
        folder.mkdir()
        (folder / "a.bin").write_bytes(b"12345")
        (folder / "b.bin").write_bytes(b"12345")
        (folder / ".half.tmp").write_bytes(b"1")
        assert held(folder) == Held(2, 10)
    assert not folder.exists()
    assert (beside / "stale.bin").exists()


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (Held(0, 0), "nothing was written to disk"),
        (Held(9, 901), "9 files hold 901 B where a page of the layout takes 100 B"),
        (Held(11, 1100), "1100 B are on disk, more than the 1000 B it may be"),
    ],
)
def test_what_is_not_as_it_should_be_on_disk_makes_a_run_invalid(found: Held, why: str) -> None:
    assert Disk(1000).reasons_invalid(found, page_bytes=100) == [why]
    assert Disk(1000).reasons_invalid(Held(10, 1000), page_bytes=100) == []


def a_run(arm: str, repeat: int) -> dict[str, Any]:
    quantised = arm_named(arm).quantises
    storage = 60 if quantised else 20
    return {
        "experiment": "l3",
        "point": "oversubscribed",
        "repeat": repeat,
        "arm": arm,
        "workload": {
            "groups": 4,
            "prefix": 90,
            "suffix": 10,
            "output": 1,
            "requests": 4,
            "concurrency": 2,
            "fill": False,
            "choice": "dealt",
        },
        "l1_tokens": 100,
        "l2_tokens": 240 if quantised else 128,
        "bytes_per_token": 102 if quantised else 200,
        "stock_tokens": 128,
        "seconds": 1.0,
        "requests": [
            {
                "prompt": 100,
                "device": 5,
                "host": 5,
                "storage": storage,
                "output": 1,
                "ttft_ms": 200.0 - storage + i,
                "e2e_ms": 300.0,
                "itl_ms": [],
            }
            for i in range(4)
        ],
        "metrics": {
            "sglang:backuped_tokens_total": 640.0,
            "sglang:prefetched_tokens_total": 4.0 * storage * 16,
            "sglang:load_back_tokens_total": 100.0,
        },
        "disk": {
            "cap_bytes": 128_000,
            "cap_tokens": 1248 if quantised else 640,
            "page_size": 16,
            "page_bytes": 1632 if quantised else 3200,
            "held_files": 30,
            "held_bytes": 30 * (1632 if quantised else 3200),
        },
        "invalid": [],
        "setup": {
            "model": "toy",
            "page_size": 16,
            "tp_size": 1,
            "dummy_weights": True,
            "server_args": [],
            "command": "python -m bench.tiers",
            "environment": {
                "versions": {"sglang": "0.5.23", "torch": "2", "hiqcache": "0.2.0"},
                "commit": "abc",
                "time": "2026-12-03T00:00:00+00:00",
                "cpu": "a CPU",
                "cores": 2,
                "gpus": [],
            },
        },
    }


def test_hits_by_tier_and_bytes_written_are_in_the_report(tmp_path: Path) -> None:
    runs = [a_run(arm, repeat) for repeat in range(2) for arm in ("bf16", "int8")]
    summary = summarise(runs)["l3"]
    int8 = summary["arms"]["int8"]
    assert (int8["device"], int8["host"], int8["storage"]) == (0.05, 0.05, 0.6)
    assert int8["hit_ratio"] == pytest.approx(0.7)
    assert summary["pooled"]["int8"]["hit_gain_points"]["value"] == pytest.approx(40)
    assert int8["disk"]["written_bytes"] == 640 * 102
    assert int8["disk"]["fetched_bytes"] == 4 * 60 * 16 * 102
    assert int8["disk"]["held_tokens"] == 480
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in runs))
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| 5.0% / 5.0% / 60.0% |" in text
    assert "| 1,632 | 0.510 | 1,248 | 480 |" in text
    assert "from L3" in (tmp_path / "plots" / "l3.svg").read_text()
