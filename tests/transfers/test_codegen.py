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

from loadtest.model import REPOSITORY


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
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


def test_every_kernel_was_compiled(rows: list[dict[str, Any]]) -> None:
    assert len(rows) == 16


def test_nothing_spills(rows: list[dict[str, Any]]) -> None:
    assert [row for row in rows if row["stack"]] == []


def test_rows_are_read_and_written_sixteen_bytes_at_a_time(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        wide = row["stores"] if row["kernel"] == "restore" else row["loads"]
        assert "v4.b32" in wide, row
        # Scales are two bytes, and nothing else is.
        narrow = {"restore": row["stores"], "backup": row["loads"]}[row["kernel"]]
        assert "b16" not in narrow, row


def test_warps_restore_int8_alone(rows: list[dict[str, Any]]) -> None:
    chosen = [row for row in rows if (row["codec"], row["kernel"]) == ("int8", "restore")]
    assert [row["barriers"] for row in chosen] == [0] * 4
