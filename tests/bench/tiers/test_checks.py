"""What makes a run invalid, each thing alone; and a run that is right."""

from __future__ import annotations

from typing import Any

import pytest

from bench.lab.arms import arm_named
from bench.lab.server_metrics import (
    CAPACITY,
    RESTORED_BYTES,
    RESTORED_TOKENS,
    STORED_BYTES,
    STORED_TOKENS,
)
from bench.lab.shapes import QWEN3_8B
from bench.tiers.checks import reasons_disturbed, reasons_invalid
from bench.tiers.plan import CPU, experiment

INT8 = arm_named("int8")
PLAN = experiment("sweep", (arm_named("bf16"), INT8), CPU, QWEN3_8B, repeats=1)
#: Qwen3-8B's int8 record, as published.
RECORD = 74_880
BEFORE = dict.fromkeys((RESTORED_TOKENS, RESTORED_BYTES, STORED_TOKENS, STORED_BYTES), 7.0)


class Restored:
    """A request of which so many tokens came from L2."""

    ttft = 0.5

    def __init__(self, host: int) -> None:
        self.host, self.storage = host, 0


def reasons(**wrong: float) -> list[str]:
    """Of a run that stored 1,000 tokens and restored 600, but for what is ``wrong``."""
    given: dict[str, float] = {
        "capacity": PLAN.capacity(INT8, QWEN3_8B),
        "restored": 600,
        "restored_bytes": 600 * RECORD,
        "stored": 1000,
        "stored_bytes": 1000 * RECORD,
        **wrong,
    }
    after = {
        CAPACITY: given["capacity"],
        RESTORED_TOKENS: 7 + given["restored"],
        RESTORED_BYTES: 7 + given["restored_bytes"],
        STORED_TOKENS: 7 + given["stored"],
        STORED_BYTES: 7 + given["stored_bytes"],
    }
    timings: Any = [Restored(400), Restored(200)]
    return reasons_invalid(PLAN, INT8, QWEN3_8B, timings, BEFORE, after)


def test_a_run_that_is_what_its_layout_says_counts() -> None:
    assert reasons() == []


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"capacity": 54_254.0}, "L2 holds 54254.0 tokens where the layout gives"),
        # BF16's rows.
        ({"restored_bytes": 600 * 147_456.0}, "it restored 147456.0 B per token"),
        ({"stored_bytes": 1000 * 147_456.0}, "it stored 147456.0 B per token"),
        ({"restored": 500.0, "restored_bytes": 500.0 * RECORD}, "requests report 600 tokens"),
        ({"stored": 0.0, "stored_bytes": 0.0}, "nothing was stored"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_each_thing_that_is_wrong_is_one_reason(wrong: dict[str, float], reason: str) -> None:
    (found,) = reasons(**wrong)
    assert found.startswith(reason)


def test_a_client_that_stood_still_longer_than_a_usual_ttft_disturbed_the_run() -> None:
    timings: Any = [Restored(1)] * 3
    assert reasons_disturbed(timings, held_up=0.4) == []
    assert len(reasons_disturbed(timings, held_up=0.6)) == 1
