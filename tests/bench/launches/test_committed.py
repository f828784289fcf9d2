"""The sweeps that are committed: their tables, and that what serves was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import REPOSITORY
from bench.launches import dma, fused

TABLES = {"launches.json": fused.table, "launches_dma.json": dma.table}
FILES = sorted((REPOSITORY / "results").glob("*/launches*.json"))


@pytest.mark.parametrize("file", FILES, ids=str)
def test_the_table_is_the_results(file: Path) -> None:
    table = TABLES[file.name](json.loads(file.read_text()))
    assert file.with_suffix(".md").read_text() == table
    assert "| **" in table, "what serves was not measured"
