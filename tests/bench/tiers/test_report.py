"""From runs to figures: what counts, what does not, and the README's tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.tiers import report
from bench.tiers.runs import RunLog, read
from bench.tiers.summaries import summarise

SETUP = {
    "model": "toy",
    "dummy_weights": True,
    "server_args": [],
    "command": "python -m bench.tiers",
    "environment": {
        "versions": {"sglang": "0.5.23", "torch": "2", "hiqcache": "0.1.0"},
        "commit": "abc",
        "time": "2026-01-01T00:00:00+00:00",
        "cpu": "a CPU",
        "cores": 2,
        "gpus": [],
    },
}


def run(
    experiment: str, arm: str, repeat: int = 0, ttft: float = 100.0, **more: Any
) -> dict[str, Any]:
    hits = 80 if arm != "bf16" else 40
    return {
        "experiment": experiment,
        "point": "share 1" if experiment == "sweep" else "oversubscribed",
        "repeat": repeat,
        "arm": arm,
        "workload": {
            "groups": 4,
            "prefix": 90,
            "suffix": 10,
            "output": 3,
            "requests": 6,
            "concurrency": 2,
            "fill": False,
            "choice": "dealt",
        },
        "l1_tokens": 200,
        "l2_tokens": 600 if arm == "bf16" else 1100,
        "bytes_per_token": 200 if arm == "bf16" else 104,
        "stock_tokens": 600,
        "seconds": 2.0,
        "requests": [
            {
                "prompt": 100,
                "device": 10,
                "host": hits - 10,
                "output": 3,
                "ttft_ms": ttft + i,
                "e2e_ms": ttft + i + 20,
                "itl_ms": [10.0, 10.0],
            }
            for i in range(6)
        ],
        "metrics": {
            "sglang:load_back_tokens_total": 300.0,
            "sglang:load_back_bytes_total": 300.0 * 104,
            # The exporter counts each of two ranks, SGLang one of them.
            "hiqcache_restore_tokens_total": 600.0,
            "hiqcache_restore_seconds_sum": 0.06,
        },
        "invalid": [],
        "setup": SETUP,
        **more,
    }


def everything() -> list[dict[str, Any]]:
    runs = [run("same-tokens", "bf16"), run("same-tokens", "int8")]
    for repeat in range(4):
        runs += [run("same-bytes", "bf16", repeat), run("same-bytes", "int8", repeat, ttft=60.0)]
        runs += [run("sweep", "bf16", repeat), run("sweep", "int8", repeat, ttft=99.0)]
    return runs


def test_figures_follow_from_the_runs() -> None:
    summaries = summarise(everything())
    b = summaries["same_bytes"]
    assert b["arms"]["bf16"]["hit_ratio"] == pytest.approx(0.4)
    assert b["arms"]["int8"]["host"] == pytest.approx(0.7)
    assert b["pooled"]["int8"]["hit_gain_points"]["value"] == pytest.approx(40)
    assert b["pooled"]["int8"]["ttft_ratio"]["high"] < 0.7
    assert len(b["pairs"]) == 4
    assert b["arms"]["int8"]["tpot_ms"]["mean"]["value"] == pytest.approx(10)
    assert b["arms"]["int8"]["restore_ms_per_1000_tokens"] == pytest.approx(100)
    a = {row["arm"]: row for row in summaries["same_tokens"]["rows"]}
    assert a["int8"]["share_of_bf16"] == pytest.approx(0.52)
    assert summaries["sweep"]["rows"][0]["fits"]
    assert summaries["sweep"]["fits_ttft_ratio"]["int8"]["value"] == pytest.approx(0.99, abs=0.01)


def test_requests_of_a_turn_are_no_independent_samples() -> None:
    def width(turn: int | None) -> float:
        pair = []
        for arm, late in (("bf16", 2), ("int8", 1)):
            one = run("sweep", arm, started=0.0)
            one["workload"]["turn"] = turn
            # Three turns of two requests, of which one comes late.
            for index, request in enumerate(one["requests"]):
                request["ttft_ms"] = 200.0 if index // 2 == late else 100.0
            pair.append(one)
        ratio = summarise(pair)["sweep"]["fits_ttft_ratio"]["int8"]
        assert ratio["value"] == 1
        return float(ratio["high"] - ratio["low"])

    assert width(2) > 1.2 * width(None)


def test_runs_that_differ_widen_an_interval_whose_turns_agree() -> None:
    runs = []
    for repeat, ttft in enumerate((90.0, 110.0)):
        for arm, value in (("bf16", 100.0), ("int8", ttft)):
            one = run("sweep", arm, repeat, started=float(repeat))
            one["workload"]["turn"] = 2
            for request in one["requests"]:
                request["ttft_ms"] = value
            runs.append(one)
    ratio = summarise(runs)["sweep"]["fits_ttft_ratio"]["int8"]
    assert (ratio["low"], ratio["high"]) == pytest.approx((0.9, 1.1))


def test_arms_that_took_turns_with_others_are_no_pair() -> None:
    runs = [run("sweep", arm, started=float(at)) for at, arm in enumerate(("bf16", "int8"))]
    for one in runs:
        one["workload"]["turn"] = 2
    assert summarise(runs)["sweep"]["rows"] == []
    runs[1]["started"] = 0.0
    assert len(summarise(runs)["sweep"]["rows"]) == 1


def test_invalid_runs_never_count() -> None:
    runs = everything()
    runs.append(run("same-bytes", "int8", 0, ttft=1.0, invalid=["L2 holds 1 tokens"]))
    summary = summarise(runs)["same_bytes"]
    assert summary["invalid_runs"] == 1
    assert summary["pairs"][0]["ttft_ms"] == pytest.approx(62.5)


def test_a_repeated_run_replaces_the_earlier_one() -> None:
    runs = [*everything(), run("same-bytes", "int8", 0, ttft=10.0)]
    assert summarise(runs)["same_bytes"]["pairs"][0]["ttft_ms"] == pytest.approx(12.5)


def test_a_report_is_made_again_from_json_alone(tmp_path: Path) -> None:
    log = tmp_path / "runs.jsonl"
    log.write_text("".join(json.dumps(each) + "\n" for each in everything()))
    report.write(tmp_path)
    first = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert {"report.md", "report.html", "same_tokens.json", "same_bytes.json", "sweep.json"} < {
        file.name for file in first
    }
    log.unlink()
    report.write(tmp_path)
    assert all(file.read_bytes() == before for file, before in first.items() if file != log)


def test_a_report_says_whether_arms_took_turns(tmp_path: Path) -> None:
    def text(runs: list[dict[str, Any]]) -> str:
        (tmp_path / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in runs))
        report.write(tmp_path)
        return (tmp_path / "report.md").read_text()

    runs = [run("sweep", arm, started=0.0) for arm in ("bf16", "int8")]
    assert "take turns" not in text(runs)
    for one in runs:
        one["workload"]["turn"] = 2
    assert "The arms take turns of 2 requests" in text(runs)
    assert "none ran" in text(runs[:1])  # nothing to compare BF16 with


def test_an_empty_folder_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no runs"):
        report.write(tmp_path)


def test_a_log_goes_on_after_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    log = RunLog(file, SETUP)
    log.add(run("same-bytes", "bf16"))
    log.add(run("same-bytes", "int8", invalid=["torn"]))
    file.write_bytes(file.read_bytes() + b'{"experiment": "b", "poi')
    again = RunLog(file, SETUP)
    assert again.find("same-bytes", "oversubscribed", 0, "bf16") is not None
    assert again.find("same-bytes", "oversubscribed", 0, "int8") is None, (
        "an invalid run is made again"
    )
    again.add(run("same-bytes", "int8"))
    assert len(read(file)) == 3


def test_another_setup_resumes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    RunLog(file, SETUP).add(run("same-bytes", "bf16"))
    assert (
        RunLog(file, {**SETUP, "model": "other"}).find("same-bytes", "oversubscribed", 0, "bf16")
        is None
    )
