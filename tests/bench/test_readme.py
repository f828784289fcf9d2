"""Documents whose tables are made from results/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import readme
from bench.tiers import report
from tests.bench.tiers.test_report import everything


def test_readme_tables_follow_results(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "runs.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in everything())
    )
    report.write(tmp_path / "h200")
    text = "Before.\n<!-- results:same-tokens -->\nold\n<!-- /results:same-tokens -->\nAfter.\n"
    filled = readme.fill(text, tmp_path)
    assert filled.startswith("Before.\n<!-- results:same-tokens -->\n| L2 |")
    assert filled.endswith("<!-- /results:same-tokens -->\nAfter.\n")
    assert readme.fill(filled, tmp_path) == filled


def test_an_arm_that_was_cut_short_shows_in_the_readme(tmp_path: Path) -> None:
    (tmp_path / "h200").mkdir()
    capacity, exact = {"host_total_tokens": 1000.0}, {"equal": 3, "compared": 4}
    pressure = {
        "requests": 2000, "restored_requests": 900, "mismatches": 1,
        "largest_change_restored": 0.5, "bound": 0.25,
    }  # fmt: skip
    arms = {
        "bf16": {"capacity": capacity, "exact": exact, "pressure": pressure},
        "int8": {"capacity": capacity, "exact": exact},
    }
    (tmp_path / "h200" / "server.json").write_text(json.dumps({"arms": arms}))
    filled = readme.fill("<!-- results:server -->\n<!-- /results:server -->", tmp_path)
    assert "| bf16 | 1,000 | 3 of 4 | 2,000 | 900 | 1 | 0.50 | 0.25 |\n" in filled
    assert "| int8 | 1,000 | 3 of 4 | not finished | – | – | – | – |\n" in filled


@pytest.mark.parametrize(
    "text",
    [
        "<!-- results:nonsense -->\n<!-- /results:nonsense -->",
        "<!-- results:same-tokens -->\n",
        "<!-- results:quality -->\n<!-- /results:quality -->",
    ],
    ids=["unknown name", "no end", "no figures"],
)
def test_readme_that_cannot_be_filled_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(readme.ReadmeError):
        readme.fill(text, tmp_path)
