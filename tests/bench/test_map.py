"""bench/README.md is the map: every measurement, started in one way, says what it needs."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
MAP = re.findall(r"^\| `(\w+)` \|", (BENCH / "README.md").read_text(), flags=re.MULTILINE)


def test_the_map_lists_what_can_be_started() -> None:
    folders = {path.parent.name for path in BENCH.glob("*/__main__.py")}
    files = {path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text()}
    assert set(MAP) == folders | files
    assert len(MAP) == len(set(MAP))


@pytest.mark.parametrize("name", MAP)
def test_each_says_how_it_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"bench.{name}", run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert f"usage: python -m bench.{name} " in capsys.readouterr().out
