"""The dma transfer's sweep: what is swept, and its report, from a result that was made up."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.launches import dma
from bench.launches.measuring import DIRECTIONS
from hiqcache.codecs import CODEC_NAMES
from hiqcache.transfers.launch import DECODE, ENCODE, RING_SLOT_BYTES, RING_SLOTS


@pytest.fixture
def result() -> dict[str, Any]:
    measured = {
        "ms_sequential": 2.9,
        "ms_random": 2.95,
        "ms_short": 0.25,
        "ms_ahead": 2.85,
        "host_ms": 1.1,
        "gemm_slowdown": 1.012,
        "decode_step_slowdown": 1.05,
    }
    rows: list[dict[str, Any]] = [
        {"kind": "stock", "codec": "bf16", "direction": direction, "kernel": "TMA", **measured}
        for direction in DIRECTIONS
    ]
    rows += [
        {
            "kind": "shape",
            "codec": shape.codec,
            "direction": direction,
            **shape.launch._asdict(),
            **shape.ring._asdict(),
            **measured,
        }
        for shape, direction in itertools.product(dma.SHAPES, DIRECTIONS)
    ]
    rows += [
        {
            "kind": "length",
            "codec": codec,
            "direction": direction,
            "transfer": transfer,
            "tokens": tokens,
            "bytes_per_token": 74_880,
            # dma has a cost of its own, and less for each token.
            "ms": (0.2 if transfer == "dma" else 0.0)
            + tokens / (1024 if transfer == "dma" else 512),
            "host_ms": 0.1,
        }
        for codec, direction, transfer, tokens in itertools.product(
            CODEC_NAMES, DIRECTIONS, ("fused", "dma"), dma.LENGTHS
        )
    ]
    return {
        "command": "python -m bench.launches --dma",
        "card": "A card",
        "pcie_gbps": {"h2d": 55.0, "d2h": 55.0},
        "rows": rows,
    }


def test_what_serves_is_swept() -> None:
    for codec in CODEC_NAMES:
        assert {dma.Shape(codec, ENCODE[codec]), dma.Shape(codec, DECODE[codec])} <= set(dma.SHAPES)
    assert dma.RINGS[0] == (RING_SLOTS, RING_SLOT_BYTES)
    assert len(set(dma.SHAPES)) == len(dma.SHAPES)


def test_what_serves_is_bold_once_in_each_direction(result: dict[str, Any]) -> None:
    restore, backup = dma.table(result).split("## Backup")
    for text in (restore, backup):
        bold = [line for line in text.splitlines() if line.startswith("| **")]
        assert [line.split("**")[1] for line in bold] == list(CODEC_NAMES)


def test_every_row_is_in_the_table(result: dict[str, Any]) -> None:
    shapes, lengths = dma.table(result).split("## Short transfers")
    rows = [row for row in result["rows"] if row["kind"] != "length"]
    # Two tables, each with a heading and a rule.
    assert sum(line.startswith("| ") for line in shapes.splitlines()) == len(rows) + 2 * 2
    found = [line for line in lengths.splitlines() if line.startswith("| int")]
    assert len(found) == (len(result["rows"]) - len(rows)) // 2
    assert "| int8 | restore | 64 | 0.125 | 0.263 | 0.100 | 0.100 |" in found


def test_dma_takes_what_it_does_in_no_more_time_at_any_longer_length(
    result: dict[str, Any],
) -> None:
    # 0.2 + n / 1024 against n / 512: from 205 tokens on.
    assert dma.least_tokens(result["rows"], "int8", "restore") == 256
    assert "- int8, restore: dma is no slower from 256 tokens on." in dma.table(result)

    def set_ms(tokens: int, ms: float) -> None:
        for row in result["rows"]:
            if row["kind"] == "length" and (row["transfer"], row["tokens"]) == ("dma", tokens):
                row["ms"] = ms

    set_ms(512, 1.1)
    assert dma.least_tokens(result["rows"], "int8", "restore") == 1024
    set_ms(2048, 4.1)
    assert dma.least_tokens(result["rows"], "int8", "restore") is None
    assert "- int8, restore: dma is no slower at no length that was tried." in dma.table(result)
