"""The findings' sentences: what they claim follows from figures, so other figures change it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import REPOSITORY, findings

RESULTS = REPOSITORY / "results"

Result = dict[str, Any]


def noise_agrees(quality: Result) -> None:
    quality["arms"]["batched"]["greedy"] = {"agreed_whole": 0.45}


def noise_is_unknown(quality: Result) -> None:
    quality["arms"]["batched"]["greedy"] = quality["arms"]["cold"]["greedy"] = None


def rotation(share: float, met: bool) -> Callable[[Result], None]:
    def change(quality: Result) -> None:
        quality["acceptance"]["int8_rot_kl_share_of_int8"]["value"] = share
        quality["acceptance"]["int8_rot_kl_met"] = met

    return change


def fitting(low: float, value: float, high: float) -> Callable[[Result], None]:
    def change(sweep: Result) -> None:
        sweep["fits_ttft_ratio"]["int8"] = {"low": low, "value": value, "high": high}

    return change


def best(value: float) -> Callable[[Result], None]:
    def change(sweep: Result) -> None:
        for row in sweep["rows"]:
            row["ttft_ratio"]["value"] = value

    return change


def beside(ours: float, stock: float) -> Callable[[Result], None]:
    def change(transfers: Result) -> None:
        for row in transfers["beside"]:
            row["slowdown"] = stock if row["transfer"] == "stock" else ours

    return change


def mismatches(server: Result) -> None:
    next(arm for arm in server["arms"].values() if "pressure" in arm)["pressure"]["mismatches"] += 3


def prefixes(groups: int) -> Callable[[Result], None]:
    def change(same_bytes: Result) -> None:
        same_bytes["workload"]["groups"] = groups

    return change


QUALITY = "quality/SmolLM2-135M-Instruct/summary.json"
SWEEP, TRANSFERS = "h200/sweep.json", "h200/transfers.json"


@pytest.mark.parametrize(
    ("file", "change", "said", "silent"),
    [
        (QUALITY, noise_agrees, "noise's share 45%", "was not measured"),
        (QUALITY, noise_is_unknown, "noise's share was not measured", "noise's share 45%"),
        (QUALITY, rotation(0.96, False), "has 0.96 of int8's", ", met"),
        (QUALITY, rotation(0.96, False), "was the target, **missed**", ", met"),
        (QUALITY, rotation(0.31, True), "was the target, met", "**missed**. "),
        (SWEEP, fitting(0.86, 0.96, 1.06), "there is nothing to gain: 0.96", "longer"),
        (SWEEP, fitting(1.01, 1.1, 1.2), "it is longer: 1.10", "nothing to gain"),
        (SWEEP, fitting(0.7, 0.8, 0.9), "it is shorter too: 0.80", "nothing to gain"),
        (SWEEP, best(0.5), "mean TTFT falls to 0.50", "does not fall"),
        (SWEEP, best(1.1), "mean TTFT does not fall: it is 1.10", "falls to"),
        (TRANSFERS, beside(1.1, 1.2), "more than by SGLang's own: nothing", "(pages of"),
        (
            *(TRANSFERS, beside(1.2, 1.1)),
            *("a GEMM beside backups (pages of one token)", "own: nothing"),
        ),
        ("h200/server.json", mismatches, "3 mismatches", " 0 mismatches"),
        ("h200/same_bytes.json", prefixes(32), "one that L2's size decides", "is not one"),
        ("h200/same_bytes.json", prefixes(8), "is not one that L2's size decides", "more than"),
        ("h200/same_bytes.json", prefixes(999), "is not one that L2's size decides", "more than"),
    ],
)
def test_a_finding_follows_its_figures(
    file: str, change: Callable[[Result], None], said: str, silent: str, tmp_path: Path
) -> None:
    for name in (QUALITY, SWEEP, TRANSFERS, "h200/server.json", "h200/same_bytes.json"):
        result = json.loads((RESULTS / name).read_text())
        if name == file:
            change(result)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(result))
    # The block that the file is for; another one may say such words of its own figures.
    lines = [findings.setting(tmp_path), *findings.findings(tmp_path).split("\n- ")]
    (own,) = [line for line in lines if said in line]
    assert silent not in own


def test_targets_that_are_met_are_not_called_missed() -> None:
    assert findings._missed([True, True]) == "All 2 targets are met"
    assert findings._missed([True, False]) == "1 of 2 targets are **missed**"
