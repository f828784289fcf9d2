"""What passed on each served release of SGLang: read from reports, kept, and shown in a table."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from docs import compatibility as document
from docs import releases
from docs.releases import Count, Release
from hiqcache.compatibility import FAMILIES
from hiqcache.sglang.adapters import SERVED

REPORT = """<testsuites><testsuite>
<testcase classname="tests.e2e.test_restores" name="test_restored_answers[int8-1]" time="1"/>
<testcase classname="tests.e2e.test_restores" name="test_restored_answers[bf16-1]" time="1"/>
<testcase classname="tests.e2e.test_restores" name="test_bytes[a[b]]"><failure/></testcase>
<testcase classname="tests.e2e.test_restores" name="test_other"><error>no</error></testcase>
<testcase classname="tests.e2e.test_restores" name="test_pressure"><skipped>why</skipped></testcase>
<testcase classname="tests.e2e.test_restores_too" name="test_x"/>
</testsuite></testsuites>"""


def test_cases_are_counted_by_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    monkeypatch.setattr(releases, "RESULTS", tmp_path / "kept")
    assert releases.main([str(tmp_path / "report.xml")]) == 0
    (release,) = releases.read_all(tmp_path / "kept")
    assert release.sglang == version("sglang")
    file = "tests/e2e/test_restores.py"
    assert release.of(f"{file}::test_restored_answers") == Count(2, 0)
    assert release.of(f"{file}::test_bytes") == release.of(f"{file}::test_other") == Count(0, 1)
    assert release.of(f"{file}::test_pressure") == Count(0, 0)
    assert release.of(file) == Count(2, 2)
    assert release.of("tests/e2e/test_restores") == Count(0, 0)


def test_a_failed_case_shows_and_what_never_ran_is_not_claimed() -> None:
    restores = "tests/e2e/test_restores.py::test_restored_answers"
    good, bad = (
        Release("0.5.23", {restores: Count(3, 0)}),
        Release("0.5.22", {restores: Count(2, 1)}),
    )
    rows = {name: cells for name, *cells in document._releases([good, bad, Release("0.5.23", {})])}
    assert rows["Plain attention (MHA, GQA, MQA)"] == [
        "passes (3 cases)",
        "**1 of 3 cases fail**",
        "not tried",
    ]
    assert "L3 storage" not in " ".join(rows)


def test_latent_attention_is_claimed_for_no_release_that_refuses_it() -> None:
    grows = "tests/sglang/test_assembly.py"
    passed = {proof.where: Count(9, 0) for proof in FAMILIES["mla"].tested} | {grows: Count(9, 0)}
    rows = document._releases([Release("0.5.23", passed), Release("0.5.22", passed)])
    cells = next(cells for name, *cells in rows if name == FAMILIES["mla"].name)
    assert cells[0].startswith("passes")
    assert cells[1].startswith("refused")


def test_what_is_kept_is_of_every_served_release_and_nothing_failed() -> None:
    kept = releases.read_all()
    assert [release.sglang for release in kept] == list(SERVED)
    for release in kept:
        assert not [name for name, count in release.tests.items() if count.failed]
