"""The transfer benchmark's targets and report, from a result that was made up."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.transfers import report, targets
from bench.transfers.targets import Target

#: Bytes per token, and milliseconds of 2,048 tokens, by page size.
CONTENDERS = {
    64: {
        ("bf16", "stock"): (147_456, 6.2),
        ("int8", "mover"): (82_944, 9.0),
        ("int8", "fused"): (74_880, 3.3),
        ("int8", "dma"): (74_880, 2.85),
        ("int8-rot", "fused"): (74_880, 3.4),
        ("int8-rot", "dma"): (74_880, 2.88),
        ("int4", "dma"): (41_526, 1.76),
    },
    16: {("bf16", "stock"): (147_456, 6.3), ("int8", "dma"): (74_880, 3.0)},
    1: {
        ("bf16", "stock"): (147_456, 6.0),
        ("int8", "mover"): (82_944, 9.0),
        ("int8", "fused"): (74_880, 3.1),
        ("int8-rot", "fused"): (74_880, 3.2),
    },
}
HELD = {"stock": 604_000_000, "mover": 170_000_000, "fused": 0, "dma": 30_000_000}
WORKS = ("gemm", "decode step")


@pytest.fixture
def result() -> dict[str, Any]:
    rows = [
        {
            "page": page,
            "codec": codec,
            "transfer": transfer,
            "direction": direction,
            "tokens": tokens,
            "slots": slots,
            "layout": layout,
            "ms_median": ms * tokens / 2048 * (1.3 if slots == "random" and ms == 6 else 1),
            "ms_p10": ms * tokens / 2048 * 0.9,
            "ms_p90": ms * tokens / 2048 * 1.4,
            "host_ms": 0.75,
            "ms_ahead": ms * tokens / 2048 * 0.95,
            "kernel": "TMA" if transfer == "stock" and page > 1 else None,
            "bytes_per_token": size,
            "pcie_share": round(2048 * size / ms / 55e6, 4),
            "staging_bytes": HELD[transfer],
        }
        for page, found in CONTENDERS.items()
        for layout, tokens, slots, direction, ((codec, transfer), (size, ms)) in itertools.product(
            ("page_first", "layer_first"),
            (128, 2048),
            ("sequential", "random"),
            ("backup", "restore"),
            found.items(),
        )
        if layout == "page_first" or tokens == 2048
    ]
    beside = [
        {
            "beside": work,
            "page": page,
            "codec": codec,
            "transfer": transfer,
            "direction": direction,
            "runs": 12,
            "ms_alone": 7.0,
            "ms_median": 7.0 * slowdown,
            "ms_min": 7.0,
            "ms_max": 9.0,
            "slowdown": slowdown,
            "covered": True,
            "ahead": True,
        }
        for page, ours in ((64, "dma"), (1, "fused"))
        for work, direction, (codec, transfer, slowdown) in itertools.product(
            WORKS,
            ("backup", "restore"),
            (("bf16", "stock", 1.05), ("int8", ours, 1.015), ("int8-rot", ours, 1.018)),
        )
    ]
    return {
        "command": "python -m bench.transfers",
        "versions": {"torch": "2"},
        "card": "A card",
        "pool_gb": 4,
        "pcie_gbps": {"h2d": 55.0, "d2h": 55.0},
        "left_out": [
            {
                "page": 1,
                "layout": "page_first",
                "codec": "int8",
                "transfer": "dma",
                "why": "packed pages of few tokens",
            }
        ],
        "rows": rows,
        "beside": beside,
    }


def stated(result: dict[str, Any], page: int, layout: str = "page_first") -> dict[str, Target]:
    return {target.name: target for target in targets.targets(result, page, layout)}


def change(result: dict[str, Any], kind: str = "rows", /, **wanted: Any) -> Any:
    return targets.find(result[kind], **wanted)


def test_at_pages_of_64_both_codecs_must_keep_the_limits(result: dict[str, Any]) -> None:
    found = stated(result, 64)
    assert all(target.met for target in found.values()), found
    assert {name: target.limit for name, target in found.items()} == {
        "restore / stock": 0.48,
        "backup / stock": 0.51,
        "restore of int4 / stock": 0.30,
        "backup of int4 / stock": 0.33,
        "restore, share of the PCIe ceiling": 0.96,
        "GPU memory held, MB": 32.0,
        "restore of 128 tokens / stock": 0.55,
        "backup of 128 tokens / stock": 0.55,
        "gemm beside a restore, slowed": 1.02,
        "gemm beside a backup, slowed": 1.02,
        # Never more than stock's, which here is less than what was asked for.
        "decode step beside a restore, slowed (stock: 1.050)": 1.05,
        "decode step beside a backup, slowed (stock: 1.050)": 1.04,
    }
    assert found["restore / stock"].values == pytest.approx(
        {"int8": 2.85 / 6.2, "int8-rot": 2.88 / 6.2}
    )


def test_int4_has_limits_of_its_own(result: dict[str, Any]) -> None:
    change(
        result,
        page=64,
        codec="int4",
        layout="page_first",
        direction="backup",
        tokens=2048,
        slots="random",
    )["ms_median"] = 2.1
    found = stated(result, 64)
    assert [target.name for target in found.values() if not target.met] == [
        "backup of int4 / stock"
    ]
    assert found["backup of int4 / stock"].value == pytest.approx(2.1 / 6.2)


@pytest.mark.parametrize(
    ("wrong", "value", "name"),
    [
        ({"direction": "restore", "tokens": 2048}, {"ms_median": 3.0}, "restore / stock"),
        ({"direction": "backup", "tokens": 2048}, {"ms_median": 3.2}, "backup / stock"),
        (
            {"direction": "restore", "tokens": 2048},
            {"pcie_share": 0.95},
            "restore, share of the PCIe ceiling",
        ),
        (
            {"direction": "backup", "tokens": 128},
            {"staging_bytes": 32_000_001},
            "GPU memory held, MB",
        ),
        (
            {"direction": "restore", "tokens": 128},
            {"ms_median": 0.3},
            "restore of 128 tokens / stock",
        ),
        (
            {"direction": "backup", "tokens": 128},
            {"ms_median": 0.3},
            "backup of 128 tokens / stock",
        ),
    ],
)
def test_one_row_of_one_codec_that_is_worse_is_a_miss(
    result: dict[str, Any], wrong: dict[str, Any], value: dict[str, Any], name: str
) -> None:
    at = {"page": 64, "layout": "page_first", "codec": "int8-rot", "transfer": "dma"}
    change(result, **at, **wrong, slots="random").update(value)
    assert [found for found, target in stated(result, 64).items() if not target.met] == [name]
    assert "**missed**" in report.summary(result)
    assert all(target.met for target in stated(result, 64, "layer_first").values())


@pytest.mark.parametrize(
    ("work", "direction", "slowdown"),
    [
        ("gemm", "restore", 1.021),
        ("gemm", "backup", 1.021),
        ("decode step", "restore", 1.051),
        ("decode step", "backup", 1.041),
    ],
)
def test_what_runs_beside_has_limits_of_its_own(
    result: dict[str, Any], work: str, direction: str, slowdown: float
) -> None:
    at = {"page": 64, "codec": "int8", "transfer": "dma", "beside": work, "direction": direction}
    change(result, "beside", **at)["slowdown"] = slowdown
    missed = [name for name, target in stated(result, 64).items() if not target.met]
    assert [name.split(",")[0] for name in missed] == [f"{work} beside a {direction}"]


def test_a_decode_step_may_lose_what_was_asked_for_where_stock_costs_more(
    result: dict[str, Any],
) -> None:
    at = {"page": 64, "codec": "bf16", "beside": "decode step", "direction": "restore"}
    change(result, "beside", **at)["slowdown"] = 1.2
    assert stated(result, 64)["decode step beside a restore, slowed (stock: 1.200)"].limit == 1.06


def test_pages_of_1_keep_the_limits_that_they_had(result: dict[str, Any]) -> None:
    found = stated(result, 1)
    assert {name: target.limit for name, target in found.items()} == {
        "restore / stock": 0.54,
        "backup / stock": 0.55,
        "backup, random slots / stock": 0.45,
        "backup, int8-rot / int8": 1.10,
        "backup, share of the PCIe ceiling": 0.85,
        "restore, int8-rot / int8": 1.10,
        "restore, share of the PCIe ceiling": 0.85,
        "GPU memory held, MB": 0,
        "gemm beside a restore, slowed (limit: stock's)": 1.05,
        "decode step beside a restore, slowed (limit: stock's)": 1.05,
    }
    # The worse slot order counts.
    assert found["restore / stock"].value == pytest.approx(3.1 / 6)
    assert found["backup, random slots / stock"].value == pytest.approx(3.1 / 7.8)
    assert found["restore / stock"].met


def test_no_targets_where_none_were_set_or_their_transfer_was_left_out(
    result: dict[str, Any],
) -> None:
    assert stated(result, 16) == {}
    result["rows"] = [row for row in result["rows"] if row["transfer"] != "dma"]
    assert stated(result, 64) == {}
    assert stated(result, 1) != {}


def test_a_transfer_costs_what_it_slows_for_as_long_as_it_takes(result: dict[str, Any]) -> None:
    rows = {
        (row["page"], row["beside"], row["direction"], row["codec"]): row
        for row in report.lost(result)
    }
    assert len(rows) == len(result["beside"])
    stock = rows[64, "gemm", "restore", "bf16"]
    assert stock["ms_lost"] == pytest.approx((1 - 1 / 1.05) * 6.2)
    costs = report.costs(result)
    assert f"restore: bf16, stock | 1.05x | {stock['ms_lost']:.2f}" in costs
    assert costs.index("| pages of 64 |") < costs.index("| pages of 1 |")


def test_it_writes_a_table_and_a_plot(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "transfers.json"
    path.write_text(json.dumps(result))
    assert "pages of 64, page_first: restore / stock" in report.write(path)
    text = (tmp_path / "transfers.md").read_text()
    row = "| page_first | sequential | 2,048 | bf16 | stock, TMA | 6.20 (5.58–8.68) | 0.89"
    assert f"{row} | 5.89 | 0.75 | 604.0 |" in text
    headings = [line for line in text.splitlines() if line.startswith("## Restore, pages of")]
    assert headings == [f"## Restore, pages of {page}" for page in (64, 16, 1)]
    assert "| 1 | page_first | int8 | dma | packed pages of few tokens |" in text
    assert "(?)" not in text
    assert (tmp_path / "transfers.png").stat().st_size > 10_000


def test_every_row_is_in_the_table(result: dict[str, Any]) -> None:
    lines = report.table(result).splitlines()
    assert sum(line.startswith(("| page_first |", "| layer_first |")) for line in lines) == len(
        result["rows"]
    )


@pytest.mark.parametrize("doubt", ["covered", "ahead"])
def test_a_slowdown_that_is_understated_says_so(result: dict[str, Any], doubt: str) -> None:
    result["beside"][3][doubt] = False
    assert report.table(result).count("(?)") == 2  # the row, and what it means


def test_a_result_of_before_there_were_pages_is_one_of_pages_of_1(result: dict[str, Any]) -> None:
    old = copy.deepcopy(result)
    for kind in ("rows", "beside"):
        old[kind] = [row for row in old[kind] if row.pop("page") == 1]
    for row in old["rows"]:
        del row["host_ms"], row["kernel"], row["ms_ahead"]
    del old["left_out"], old["pool_gb"]
    assert targets.pages(old) == [1]
    assert targets.targets(old, 1, "page_first") == targets.targets(result, 1, "page_first")
    assert "pages of 1" in report.table(old)


def test_an_unmeasured_setting_is_an_error(result: dict[str, Any]) -> None:
    with pytest.raises(LookupError, match="0 rows"):
        targets.find(result["rows"], codec="int2")
