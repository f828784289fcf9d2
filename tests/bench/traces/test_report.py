"""The report of simulated and replayed traces, made again from the results that are committed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench import REPOSITORY
from bench.traces import report


def test_a_report_is_made_again_from_json_alone(tmp_path: Path) -> None:
    committed = REPOSITORY / "results" / "traces"
    for file in committed.glob("*.json"):
        shutil.copy(file, tmp_path)
    report.write(tmp_path)
    # The headings name the folder.
    ours, theirs = ((folder / "report.md").read_text() for folder in (tmp_path, committed))
    assert ours.partition("\n")[2] == theirs.partition("\n")[2]
    assert "Traces, simulated" in ours
    assert "Traces, replayed on servers" in ours
    assert (tmp_path / "plots" / "traces.svg").exists()


def test_an_empty_folder_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no simulation"):
        report.write(tmp_path)
