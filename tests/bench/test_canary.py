"""What bench.canary calls a fault."""

from __future__ import annotations

from typing import Any

import pytest

from bench.canary import problems, report

COPY = {"restored": 208, "identical": 208, "kl_nats_max": 0.0}
LOSSY = {
    "restored": 32,
    "kl_nats_interval": {"value": 0.0013, "low": 0.0012, "high": 0.0014},
    "harness_kl_nats": {
        "listed": {"value": 0.00135, "low": 0.00125, "high": 0.00145},
        "harness": {"value": 0.0016, "low": 0.0015, "high": 0.0017},
    },
    "published_kl_nats": {"value": 0.00165, "low": 0.00155, "high": 0.00175},
}


def test_a_copy_at_zero_and_a_codec_at_the_harnesss_figure_are_fine() -> None:
    assert problems({"bf16": COPY, "int8": LOSSY, "int8-rot": LOSSY}, 208) == []


def test_a_codec_without_a_published_figure_is_judged_by_the_harness() -> None:
    assert problems({"int8": {**LOSSY, "published_kl_nats": None}}, 208) == []


@pytest.mark.parametrize(
    ("arm", "change", "said"),
    [
        ("bf16", {"restored": 207}, "207 compared, not 208"),
        ("bf16", {"identical": 207}, "1 of 208 restored copies differ"),
        ("bf16", {"kl_nats_max": 1e-9}, "by 1e-09 nats"),
        ("int8", {"kl_nats_interval": {"value": 0.01, "low": 0.009, "high": 0.011}}, "0.01 "),
        ("int8", {"kl_nats_interval": {"value": 1e-4, "low": 9e-5, "high": 2e-4}}, "0.0001 "),
        ("int8", {"published_kl_nats": {"value": 0.01, "low": 0.009, "high": 0.011}}, "has 0.01 "),
    ],
)
def test_what_is_wrong_is_named(arm: str, change: dict[str, Any], said: str) -> None:
    whole = COPY if arm == "bf16" else LOSSY
    (problem,) = problems({arm: {**whole, **change}}, 208)
    assert said in problem
    assert problem.startswith(f"{arm}: ")


def test_the_report_shows_both_figures_and_what_is_wrong() -> None:
    more = {
        "prefix_tokens": 256,
        "scored_tokens_per_prompt": 32,
        "prompts": 16,
        "kl_nats_max": 0.5,
        "top1_agreement": 0.99,
        "identical": 3,
    }
    text = report(
        {
            "model": "a-model",
            "command": "python -m bench.canary",
            "page_size": 64,
            "arms": {
                "int8": {**LOSSY, **more},
                "int4": {**LOSSY, **more, "published_kl_nats": None},
            },
            "problems": ["int8: it is off."],
            "environment": {
                "gpus": [],
                "cores": 2,
                "cpu": "a CPU",
                "commit": "abc",
                "time": "today",
                "versions": {"sglang": "1", "torch": "2"},
            },
        }
    )
    ours = "32 of 16 | 3 | 0.0013 (0.0012 to 0.0014) | 0.00135 (0.00125 to 0.00145)"
    assert f"| int8 | 256 + 32 | {ours} | 0.0016 (0.0015 to 0.0017) | 0.00165" in text
    assert f"| int4 | 256 + 32 | {ours} | 0.0016 (0.0015 to 0.0017) | – |" in text
    assert "- **int8: it is off.**" in text
    assert ", pages of 64." in text
