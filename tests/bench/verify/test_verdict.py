"""The verdict, fed the wrong thing once for each thing that can be wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from bench import REPOSITORY
from bench.lab.arms import arm_named
from bench.lab.shapes import QWEN3_8B
from bench.lab.shards import Shards
from bench.verify.stages import Sizes
from bench.verify.verdict import problems
from hiqcache.host_pools import HostPool

SIZES = Sizes(14, 2048, 1500, 96, requests=10_000, concurrency=32)
POOLS = (HostPool("kv", QWEN3_8B),)

Found = dict[str, Any]


@pytest.fixture(scope="module")
def measured() -> dict[str, Found]:
    """What an H200's servers answered, in the form that is written today."""
    arms: dict[str, Found] = json.loads((REPOSITORY / "results/h200/server.json").read_text())[
        "arms"
    ]
    for arm, found in arms.items():
        codec, _, transfer = arm.partition(":")
        transfer = transfer or ("stock" if codec == "bf16" else "fused")
        ranks = found["capacity"]["ranks"]
        if any("bytes_per_token" in rank for rank in ranks.values()):
            found["capacity"] |= {
                "page_size": 1,
                "tp_size": len(ranks),
                "ranks": {
                    rank: {"kv": {"codec": codec, "transfer": transfer, **values}}
                    for rank, values in ranks.items()
                },
            }
    return arms


def verdict(arm: str, found: Found) -> list[str]:
    cut = Shards(page_size=1)
    return problems(arm_named(arm), found, SIZES, POOLS, cut)


@pytest.mark.parametrize("arm", ["bf16", "int8", "int8:fused", "int8-rot", "int8-rot:auto"])
def test_what_was_measured_passes(arm: str, measured: dict[str, Found]) -> None:
    assert verdict(arm, measured[arm.partition(":")[0]]) == []


def test_a_quantised_arm_that_is_bf16_does_not_pass(measured: dict[str, Found]) -> None:
    seen = verdict("int8", measured["bf16"])
    assert "int8: rank 0, pool kv: its codec is bf16, not int8" in seen
    assert "int8: rank 0, pool kv: 147456.0 bytes per token, where the layout has 74880" in seen
    assert "int8: all 14 restored answers are bit-equal to L1's, so nothing was quantised" in seen


def test_an_arm_that_another_transfer_serves_does_not_pass(measured: dict[str, Found]) -> None:
    assert verdict("int8:dma", measured["int8"]) == [
        "int8:dma: rank 0, pool kv: its transfer is fused, not dma"
    ]


def test_bf16_that_is_quantised_does_not_pass(measured: dict[str, Found]) -> None:
    seen = verdict("bf16", measured["int8"])
    assert "bf16: 14 of 14 restored answers differ from L1's" in seen
    assert any("where the layout has 147456" in each for each in seen)


def test_an_arm_that_was_cut_short_does_not_pass(measured: dict[str, Found]) -> None:
    half = {stage: measured["int8"][stage] for stage in ("capacity", "exact")}
    assert verdict("int8", half) == ["int8: it was cut short: no figures of pressure"]
    assert verdict("int8", {}) == [
        "int8: it was cut short: no figures of capacity, exact, pressure"
    ]


def _set(*path: str, value: Any) -> Callable[[Found], None]:
    def change(found: Found) -> None:
        for key in path[:-1]:
            found = found[key]
        found[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_set("capacity", "ranks", value={}), "0 ranks report a pool, of 1"),
        (_set("capacity", "tp_size", value=2), "it serves Shards(page_size=1, tp_size=2), where"),
        (_set("capacity", "page_size", value=64), "it serves Shards(page_size=64, tp_size=1)"),
        (
            _set("capacity", "ranks", "0", "kv", "bytes_per_token", value=147456),
            "pool kv: 147456 bytes per token",
        ),
        (_set("exact", "compared", value=0), "no long prompt was restored"),
        (_set("pressure", "requests", value=9999), "9999 requests under pressure, of 10000"),
        (_set("pressure", "restored_requests", value=0), "nothing was restored under pressure"),
        (_set("pressure", "bound", value=0.0), "answer every prompt alike"),
        (_set("capacity", "host_total_tokens", value=144_000), "so nothing had to leave"),
        (_set("pressure", "mismatches", value=1), "1 mismatches under pressure"),
    ],
)
def test_each_fault_is_said(
    change: Callable[[Found], None], text: str, measured: dict[str, Found]
) -> None:
    found = copy.deepcopy(measured["int8"])
    change(found)
    (problem,) = verdict("int8", found)
    assert text in problem


def test_prompts_that_fit_l2_in_whole_pages_do_not_pass(measured: dict[str, Found]) -> None:
    found = copy.deepcopy(measured["int8"])
    found["capacity"]["page_size"] = 64
    layout = found["capacity"]["ranks"]["0"]["kv"]
    layout["bytes_per_token"] = arm_named("int8").bytes_per_token(QWEN3_8B, 64)
    # Of 96 tokens 64 are kept: 1,500 of them are less than what L2 holds.
    (problem,) = problems(arm_named("int8"), found, SIZES, POOLS, Shards(64))
    assert "1500 prompts leave 96000 there, so nothing had to leave" in problem


def test_a_pool_that_no_rank_reports_does_not_pass(measured: dict[str, Found]) -> None:
    found = copy.deepcopy(measured["int8"])
    found["capacity"]["ranks"]["0"] = {"swa": {}}
    assert any("pool kv: None bytes per token" in each for each in verdict("int8", found))


def test_a_model_whose_pools_are_unknown_does_not_pass(measured: dict[str, Found]) -> None:
    (problem,) = problems(arm_named("int8"), measured["int8"], SIZES, (), Shards(1))
    assert "is not known" in problem
