"""The fused transfer's sweep: its report, from the result that is committed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench import REPOSITORY
from bench.launches import fused
from hiqcache.codecs import TOKEN_CODECS
from hiqcache.transfers.launch import BACKUP, RESTORE

FILE = REPOSITORY / "results" / "h200" / "launches.json"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def test_what_the_transfer_launches_was_measured(result: dict[str, Any]) -> None:
    bold = [line for line in fused.table(result).splitlines() if line.startswith("| **")]
    shapes = {tuple(cell.strip("|* ") for cell in line.split(" | "))[:6] for line in bold}
    assert shapes == {
        (codec, order, f"{launch.elements:,}", *map(str, launch[2:]), str(launch.programs))
        for codec, order, launch in (
            *(
                (codec, "page_first", launch)
                for codec, launch in RESTORE.items()
                if codec in TOKEN_CODECS
            ),
            *(
                (codec, order, launch)
                for (codec, order), launch in BACKUP.items()
                if codec in TOKEN_CODECS
            ),
        )
    }
    assert len(bold) == 3 * len(TOKEN_CODECS)


def test_every_row_and_the_copy_engine_are_in_the_table(result: dict[str, Any]) -> None:
    lines = fused.table(result).splitlines()
    cells = [line.split(" | ") for line in lines if line.startswith("| ") and "---" not in line]
    assert len(cells) == len(result["rows"]) + 2  # two headings
    assert {len(row) for row in cells} == {13}
    assert sum("copy engine" in row[0] for row in cells) == 2


def test_the_copy_engine_moves_bf16_rows() -> None:
    """Both ways, of every layer: what it costs others is then that of as many bytes."""
    import torch

    class Pool:
        k, v = (
            [torch.randn(8, 2, 4).to(torch.bfloat16) for _ in range(fused.LAYERS)] for _ in range(2)
        )

    tokens = torch.arange(8)
    rows = torch.stack([*Pool.k, *Pool.v])
    host = torch.zeros(rows.nbytes, dtype=torch.uint8)
    engine = fused.CopyEngine(host, Pool())  # type: ignore[arg-type]
    engine.backup(tokens, tokens)
    for buffer in (*Pool.k, *Pool.v):
        buffer.zero_()
    for layer in range(fused.LAYERS):
        engine.restore(layer, tokens, tokens)
    assert torch.equal(torch.stack([*Pool.k, *Pool.v]), rows)
