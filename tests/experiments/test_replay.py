"""Prompts of a trace at a smaller scale, and what a replay's report says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.experiments.replay import prompts, simulate
from loadtest.experiments.tiers import Hit
from loadtest.workloads.trace import Trace


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    lines = [
        {"timestamp": 0, "input_length": 1300, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 1, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]},
        {"timestamp": 2, "input_length": 1536, "output_length": 5, "hash_ids": [1, 4, 5]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Trace(path)


def test_blocks_shrink_and_shared_prefixes_stay(trace: Trace) -> None:
    first, second, third = prompts(trace, 3, block_tokens=16, longest=1000)
    # 1,300 tokens are 2.54 blocks, the last one begun.
    assert [len(first), len(second), len(third)] == [41, 32, 48]
    assert first[:32] == second
    assert third[:16] == first[:16]
    assert third[16:32] != first[16:32]


def test_prompts_are_cut_and_counted(trace: Trace) -> None:
    assert [len(prompt) for prompt in prompts(trace, 2, block_tokens=16, longest=20)] == [20, 20]


def test_whole_blocks_are_the_traces_own(trace: Trace) -> None:
    asked = prompts(trace, 3, block_tokens=512, longest=100_000)
    assert asked == [list(trace.request(line).tokens or ()) for line in trace.lines]


def test_the_simulation_sees_the_same_prompts(trace: Trace) -> None:
    asked = prompts(trace, 3, block_tokens=16, longest=1000)
    assert simulate(asked, 1000, 1000) == [Hit(0, 0), Hit(31, 0), Hit(16, 0)]
