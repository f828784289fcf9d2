"""The soak's file goes on where an earlier session left it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.soak.record import Record


def test_sessions_add_up(tmp_path: Path) -> None:
    file = tmp_path / "soak" / "pool.json"
    first = Record(file, "pool", "one")
    assert (first.session, first.done("int8")) == (0, 0)
    first.add("int8", Counter(checked_restores=10, loads=2), 1.5, [])
    first.add("int8", Counter(checked_restores=5), 1.0, [])
    second = Record(file, "pool", "two")
    assert (second.session, second.done("int8"), second.done("bf16")) == (1, 15, 0)
    second.add("int8", Counter(checked_restores=1), 1.0, [{"round": 7}])
    found = json.loads(file.read_text())
    assert [session["command"] for session in found["sessions"]] == ["one", "two"]
    assert found["arms"]["int8"]["counts"] == {"checked_restores": 16, "loads": 2}
    assert found["arms"]["int8"]["seconds"] == 3.5
    assert found["arms"]["int8"]["faults"] == [{"session": 1, "round": 7}]
    report = file.with_suffix(".md").read_text()
    assert "| int8 | 16 | 0 | – | 1 | 4 |" in report
    assert "- `one` on" in report
    assert "- `two` on" in report


def test_another_mode_s_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pool.json"
    Record(file, "pool", "one").add("int8", Counter(), 0.0, [])
    with pytest.raises(ValueError, match="of mode pool, not server: name another file"):
        Record(file, "server", "two")
