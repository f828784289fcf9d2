"""Documents whose tables are made from results/."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench import REPOSITORY, readme
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
    result = {"arms": arms, "versions": {"sglang": "0.5.23"}, "card": ["a GPU"]}
    (tmp_path / "h200" / "server.json").write_text(json.dumps(result))
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


def test_a_block_says_what_made_it_by_the_results_own_record() -> None:
    environment = {
        "commit": "abc1234", "time": "2026-01-02T03:04:05+00:00", "gpus": ["A GPU"],
        "versions": {"sglang": "0.5.23", "torch": "2.11.0"},
    }  # fmt: skip
    expected = "1 x A GPU, 2026-01-02, at commit abc1234 (SGLang 0.5.23, torch 2.11.0)"
    assert expected in readme.made({"environment": environment})
    assert expected in readme.made({"setup": {"environment": environment}})
    assert expected in readme.made({"made_by": {"environment": environment}})
    assert "names no commit" in readme.made({"versions": {"sglang": "1"}, "card": ["A GPU, 1"]})


def test_readme_fits_on_two_screens_and_every_figure_in_it_is_made() -> None:
    text = (REPOSITORY / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    blocks = readme._BLOCK.findall(text)
    assert {"headline", "findings", "demo-large", "plan"} <= {name for name, _ in blocks}
    typed = readme._BLOCK.sub("", text)
    typed = re.sub(r"^```.*?^```", "", typed, flags=re.DOTALL | re.MULTILINE)
    figure = (
        r"\d[\d,.]*\s?(?:%|x\b|ms\b|s\b|GB\b|GiB\b|B\b|times|tokens|points|nats)|\b0\.\d+\b(?!\.)"
    )
    assert re.findall(figure, typed) == []


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in (*readme.DOCUMENTS, *(REPOSITORY / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", document.read_text()):
            path, anchor = link
            if path.startswith("http"):
                continue
            target = (document.parent / path).resolve() if path else document
            assert target.exists(), f"{document.name}: {path}"
            if anchor and target.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
                slugs = {
                    re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings
                }
                assert anchor[1:] in slugs, f"{document.name}: {path}{anchor}"
