"""The clock of tokens, against what sglang.bench_serving computes from the same stream."""

from __future__ import annotations

import pytest

from loadtest.token_times import TokenTimes


def test_a_chunk_of_several_tokens() -> None:
    """As sglang.benchmark.serving, async_request_sglang_generate: chunk_gap / num_new_tokens."""
    times = TokenTimes()
    for tokens, now in ((2, 0.5), (2, 0.6), (3, 0.7), (5, 1.1)):
        times.chunk(tokens, now)
    assert times.ttft == 0.5
    # The first chunk's second token has no gap; a chunk without a new token is none.
    assert times.itl == pytest.approx([0.2, 0.2, 0.2])
    assert times.output_tokens == 5
    assert times.e2e == 0


def test_the_end_is_the_streams_and_not_the_last_tokens() -> None:
    """As there: ``latency`` is taken at every line, [DONE] included, and TPOT follows from it."""
    times = TokenTimes()
    times.chunk(1, 0.5)
    times.chunk(3, 0.9)
    times.end(1.1)
    assert times.e2e == 1.1
    assert times.tpot == pytest.approx((1.1 - 0.5) / 2)


def test_one_token_has_no_tpot() -> None:
    times = TokenTimes()
    times.chunk(1, 0.5)
    times.end(0.6)
    assert times.tpot is None
