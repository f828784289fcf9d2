"""The transfer benchmark's report, from a result that was made up."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bench.transfers import report

CONTENDERS = {
    ("bf16", "stock"): (147_456, 6.0),
    ("int8", "mover"): (82_944, 9.0),
    ("int8", "fused"): (74_880, 3.1),
    ("int8-rot", "fused"): (74_880, 3.2),
}


@pytest.fixture
def result() -> dict[str, Any]:
    rows = [
        {
            "codec": codec,
            "transfer": transfer,
            "direction": direction,
            "tokens": tokens,
            "slots": slots,
            "layout": layout,
            "ms_median": ms * tokens / 2048 * (1.3 if slots == "random" and ms == 6 else 1),
            "ms_p10": ms * tokens / 2048 * 0.9,
            "ms_p90": ms * tokens / 2048 * 1.4,
            "bytes_per_token": size,
            "pcie_share": round(tokens * size / ms / 55e6 * 2048 / tokens, 4),
            "staging_bytes": 0 if transfer == "fused" else 1000,
        }
        for layout, tokens, slots, direction, ((codec, transfer), (size, ms)) in itertools.product(
            ("page_first", "layer_first"),
            (128, 2048),
            ("sequential", "random"),
            ("backup", "restore"),
            CONTENDERS.items(),
        )
    ]
    beside = [
        {
            "beside": work,
            "codec": codec,
            "transfer": transfer,
            "direction": "restore",
            "runs": 12,
            "ms_alone": 7.0,
            "ms_median": 7.0 + ms / 10,
            "ms_min": 7.0,
            "ms_max": 9.0,
            "slowdown": 1 + ms / 70,
            "covered": True,
        }
        for work, ((codec, transfer), (_, ms)) in itertools.product(
            ("gemm", "decode step"), CONTENDERS.items()
        )
    ]
    return {
        "command": "python -m bench.transfers",
        "versions": {"torch": "2"},
        "card": "A card",
        "pcie_gbps": {"h2d": 55.0, "d2h": 55.0},
        "rows": rows,
        "beside": beside,
    }


def test_targets_take_the_worst_setting(result: dict[str, Any]) -> None:
    targets = {target.name: target for target in report.targets(result, "page_first")}
    restore = targets["restore, fused int8 / stock BF16"]
    assert restore.value == pytest.approx(3.1 / 6)
    assert restore.met
    assert targets["backup, random slots, fused int8 / stock BF16"].value == pytest.approx(
        3.1 / 7.8
    )
    share = targets["restore, share of the PCIe ceiling"]
    assert share.at_least
    assert share.met == (share.value >= 0.85)
    assert all(target.met for target in targets.values() if "slowdown" in target.name)


def test_a_missed_target_shows(result: dict[str, Any]) -> None:
    report.find(
        result["rows"], codec="int8", transfer="fused", direction="restore", tokens=2048,
        slots="random", layout="layer_first",
    )["ms_median"] = 5.0  # fmt: skip
    name = "restore, fused int8 / stock BF16"
    missed = {
        layout: [each.name for each in report.targets(result, layout) if not each.met]
        for layout in report.layouts(result)
    }
    assert name in missed["layer_first"]
    assert name not in missed["page_first"]
    assert "**missed**" in report.table(result)


def test_a_restore_costs_what_it_slows_for_as_long_as_it_takes(result: dict[str, Any]) -> None:
    rows = {(row["beside"], row["transfer"]): row for row in report.lost(result)}
    stock = rows["gemm", "stock"]
    share = 1 - stock["ms_alone"] / stock["ms_median"]
    restore = report.find(
        result["rows"], transfer="stock", direction="restore", tokens=2048,
        slots="sequential", layout="page_first",
    )["ms_median"]  # fmt: skip
    assert stock["ms_lost"] == pytest.approx(share * restore, rel=1e-3)
    assert f"{stock['slowdown']:.2f}x | {stock['ms_lost']:.2f}" in report.costs(result)


def test_it_writes_a_table_and_a_plot(result: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "transfers.json"
    path.write_text(json.dumps(result))
    assert "restore, fused int8 / stock BF16" in report.write(path)
    text = (tmp_path / "transfers.md").read_text()
    assert "| page_first | sequential | 2,048 | int8 | fused | 3.10 (2.79–4.34) | 0.90 |" in text
    assert (tmp_path / "transfers.png").stat().st_size > 10_000


def test_an_unmeasured_setting_is_an_error(result: dict[str, Any]) -> None:
    with pytest.raises(LookupError, match="0 rows"):
        report.find(result["rows"], codec="int4")
