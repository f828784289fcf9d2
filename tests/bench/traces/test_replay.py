"""Prompts of a trace at a smaller scale, and the table of a replay."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.traces import tables
from bench.traces.replay import prompts, simulate
from bench.traces.two_tiers import Hit
from loadtest.workloads.mooncake import Trace


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


def test_whole_pages_are_cached_all_but_that_of_the_last_token(trace: Trace) -> None:
    # Prompts of 41, 32 and 48 tokens, of which 32 and 16 are shared.
    asked = prompts(trace, 3, block_tokens=16, longest=1000)
    assert simulate(asked, 1008, 1008, page_size=8) == [Hit(0, 0), Hit(24, 0), Hit(16, 0)]
    assert simulate(asked, 1024, 1024, page_size=32) == [Hit(0, 0), Hit(0, 0), Hit(0, 0)]
    # L1 of six pages: what left it is restored, but for fewer than ten tokens.
    for length, restored in ((15, 0), (23, 16)):
        again = [asked[0], [*range(9000, 9048)], asked[0][:length]]
        assert simulate(again, 48, 480, page_size=8)[2] == Hit(0, restored)


def test_a_report_shows_both_hit_ratios() -> None:
    interval = {"value": 100.0, "low": 90.0, "high": 110.0}
    row = {
        "l1_tokens": 100,
        "hit_ratio": 0.25,
        "simulated_hit_ratio": 0.26,
        "requests_as_simulated": 58,
        "ttft_ms": interval,
        "ttft_ratio": {"value": 1.0, "low": 0.9, "high": 1.1},
    }
    summary = {
        "replayed": "a-trace",
        "requests": 60,
        "block_tokens": 8,
        "max_input_tokens": 1024,
        "rows": [
            {**row, "arm": "bf16", "l2_tokens": 1000},
            {**row, "arm": "int8", "l2_tokens": 1900},
        ],
    }
    table = tables.replays([summary]).markdown()
    assert "| 1,900 | 25.0% | 26.0% | 58 of 60 | 100 (90–110) | 1.000 (0.900–1.100) |" in table
    assert "60, 8 tokens per block, 1,024 at most | 100 | stock BF16 | 1,000 |" in table
