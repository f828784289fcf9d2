"""What the demo makes of its answers."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from bench import REPOSITORY, demo
from bench.lab.completions import Completion


@pytest.fixture
def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((REPOSITORY / "results/demo/summary.json").read_text())
    return found


def completion(*tokens: str, device: int = 0, host: int = 0) -> Completion:
    return Completion(tokens, (0.0,) * len(tokens), 1.0, 20, device, host)


def test_only_what_no_cache_has_touched_is_noise() -> None:
    reference = completion("a", device=16)
    assert demo.Answer(completion("a"), reference).cold
    assert not demo.Answer(completion("a", host=16), reference).cold
    assert not demo.Answer(completion("a", device=16), reference).cold
    assert demo.Answer(completion("a", host=16), reference).restored
    assert not demo.Answer(completion("a", host=8), reference).restored


def test_figures_stand_under_the_codecs_own_name(summary: dict[str, Any]) -> None:
    other = copy.deepcopy(summary)
    other["made_by"]["codec"] = "int8-rot"
    for name in demo.WORKING_SETS:
        other[name]["int8-rot"] = other[name].pop("int8")
    assert demo.problems(other) == demo.problems(summary) == []
    assert "INT8-ROT" in demo.tables(other)
    assert "INT8-ROT" not in demo.tables(summary)


def test_the_noise_stands_below_what_it_is_the_noise_of(summary: dict[str, Any]) -> None:
    for figures in (summary["large"]["bf16"], summary["large"]["int8"]):
        figures |= {"cold_answers_equal": 11, "cold_prompts": 12}
    lines = demo.tables(summary, "large").splitlines()
    (equal,) = [n for n, line in enumerate(lines) if line.startswith("answers equal to reference")]
    assert lines[equal + 1].startswith("  noise: cold ones equal")
    assert lines[equal + 1].count("11 of 12") == 2


def test_one_working_set_can_be_shown_alone(summary: dict[str, Any]) -> None:
    large, both = demo.tables(summary, "large"), demo.tables(summary)
    assert both.startswith(large)
    assert "no gain expected" in both
    assert "no gain expected" not in large


@pytest.mark.parametrize(
    ("arm", "key", "value", "text"),
    [
        ("bf16", "answers_equal", 4, "BF16 restored answers differ"),
        ("int8", "prompts", 0, "no answer of int8 could be compared"),
        ("int8", "l2_bytes", 1e9, "larger than the BF16 one"),
        ("int8", "l2_tokens", 7900, "less than 1.93 times"),
        ("int8", "hit_ratio", 0.2, "the hit ratio rose by less than 15%"),
        ("int8", "agreement", 0.8, "under 90%"),
    ],
)
def test_what_contradicts_the_demo_is_said(
    arm: str, key: str, value: float, text: str, summary: dict[str, Any]
) -> None:
    summary["large"][arm][key] = value
    (problem,) = demo.problems(summary)
    assert text in problem
