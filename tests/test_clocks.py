"""Durations are of a clock that nobody sets: a jump of the time of day changes nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hiqcache"
TIMES_OF_DAY = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}


def times_of_day(source: str) -> Iterator[int]:
    """Lines of ``source`` that read the time of day."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name | ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            if (owner, node.attr) in TIMES_OF_DAY:
                yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (node.lineno for alias in node.names if alias.name.startswith("time"))


def test_the_package_reads_no_time_of_day() -> None:
    files = list(PACKAGE.rglob("*.py"))
    assert len(files) > 40
    found = {str(file): list(times_of_day(file.read_text())) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_a_reading_is_seen() -> None:
    source = "import time, datetime\ntime.time()\ndatetime.datetime.now()\ntime.monotonic()\n"
    assert list(times_of_day(source)) == [2, 3]
    assert list(times_of_day("from time import time\n")) == [1]
