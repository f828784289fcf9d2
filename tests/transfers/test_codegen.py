"""What Triton makes of the fused kernels for sm_90: wide accesses, no spills, no needless waiting.

Tests of bytes cannot see any of this; one lost alignment hint makes every access 2 bytes wide.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from bench import REPOSITORY
from hiqcache.codecs import CODEC_NAMES, TOKEN_CODECS
from hiqcache.codecs.base import FP8_DTYPES


@pytest.fixture(scope="module")
def every() -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.transfers.codegen"],
        cwd=REPOSITORY,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def rows(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Kernels of codecs that store a token's rows by themselves."""
    return [row for row in every if row["codec"] in TOKEN_CODECS]


def test_every_kernel_was_compiled(every: list[dict[str, Any]]) -> None:
    assert len(every) == 16 * len(CODEC_NAMES) + 2 * len(FP8_DTYPES)


def test_nothing_spills_in_a_loop(every: list[dict[str, Any]]) -> None:
    assert [row for row in every if row["spilled"]] == []


def test_rows_and_codes_of_a_page_are_moved_many_bytes_at_a_time(
    every: list[dict[str, Any]],
) -> None:
    """What is a page's own, middles, steps and kept tokens, is few bytes and many instructions."""
    for row in every:
        if row["codec"] in TOKEN_CODECS:
            continue
        rows, codes = "loads", "stores"
        if row["kernel"] == "restore":
            rows, codes = codes, rows
        assert "v4.b32" in row[rows], row
        assert row[f"wide_{rows}"] >= 0.8, row
        assert {"v2.b32", "v4.b32"} & set(row[codes]), row
        assert row[f"wide_{codes}"] >= 0.3, row


def test_rows_and_records_are_moved_sixteen_bytes_at_a_time(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert "v4.b32" in row["stores"], row
        if row["stages"] == 1:
            # Addresses and slots beside the rows.
            assert row["loads"] == ["b64", "v4.b32"], row
        else:
            # A rotation's operand is read eight at a time; a backup stores scales of two bytes.
            widest = 8 if (row["codec"], row["kernel"]) == ("int8-rot", "restore") else 16
            assert max(row["copies"]) == widest, row
        assert set(row["stores"]) <= {"v4.b32", "b16"}, row
        assert row["kernel"] == "backup" or "b16" not in row["stores"], row


def test_a_round_waits_once_for_what_was_asked_for_rounds_ago(rows: list[dict[str, Any]]) -> None:
    """A load that is no copy, as of two bytes, would wait for PCIe each time."""
    for row in rows:
        rotation = ["v4.b32"] if row["codec"] == "int8-rot" else []
        if row["stages"] == 1:
            # A backup: of what it reads, nothing is on the host.
            assert row["kernel"] == "backup", row
            assert (row["pending"], row["copies"]) == ([], []), row
            continue
        (pending,) = row["pending"]
        # A restore's round copies slots, device slots, codes and scales, a backup's bases and rows.
        assert pending >= (4 if row["kernel"] == "restore" else 2), row
        # Beside the loop: where a layer's rows are or slots, and the rotation.
        assert row["loads"] == ["b64", *rotation], row


def test_four_that_are_packed_are_neighbours_in_a_row(rows: list[dict[str, Any]]) -> None:
    """The kernel's PTX takes them for that, with one mask for all four."""
    for row in rows:
        # A product's operands and results lie otherwise: int8-rot packs none.
        assert len(row["packed"]) == (1 if row["codec"] == "int8" else 0), row
        assert all(together % 4 == 0 and together for together in row["packed"]), row


def test_stages_fit_into_small_multiprocessors(every: list[dict[str, Any]]) -> None:
    """99 KiB, as an L40S has; the H200 has 227."""
    assert max(row["shared"] for row in every) <= 99 * 1024
