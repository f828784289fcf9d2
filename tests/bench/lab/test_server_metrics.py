"""A server's /metrics as measurements read it."""

from __future__ import annotations

import pytest

from bench.lab.server_metrics import by_labels, totals

PAGE = """\
# HELP sglang:load_back_tokens_total Tokens, with "quotes" and a { in their help.
# TYPE sglang:load_back_tokens_total counter
sglang:load_back_tokens_total{model_name="a } b, \\"c\\" 9",tp_rank="0"} 40.0
sglang:load_back_tokens_total{model_name="a } b, \\"c\\" 9",tp_rank="1"} 2.0 1700000000000
# TYPE hiqcache_l2_capacity_tokens gauge
hiqcache_l2_capacity_tokens{tp_rank="0"} 1e3
hiqcache_l2_capacity_tokens{tp_rank="1"} 1000
# TYPE hiqcache_restore_seconds histogram
hiqcache_restore_seconds_bucket{le="0.1",tp_rank="0"} 3
hiqcache_restore_seconds_bucket{le="+Inf",tp_rank="0"} 3
hiqcache_restore_seconds_sum{tp_rank="0"} 0.5
hiqcache_restore_seconds_count{tp_rank="0"} 3
"""


def test_samples_are_summed_whatever_their_labels_hold() -> None:
    """A label with a space or a brace, and a time stamp behind the value."""
    assert totals(PAGE) == {
        "sglang:load_back_tokens_total": 42.0,
        "hiqcache_l2_capacity_tokens": 2000.0,
        "hiqcache_restore_seconds_sum": 0.5,
        "hiqcache_restore_seconds_count": 3.0,
    }


def test_ranks_are_told_apart() -> None:
    assert by_labels(PAGE, ["tp_rank"], "hiqcache_l2_") == {
        ("0",): {"capacity_tokens": 1000.0},
        ("1",): {"capacity_tokens": 1000.0},
    }
    assert by_labels(PAGE, ["tp_rank", "pool"], "hiqcache_l2_") == {}


def test_a_page_that_is_no_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match="invalid metric name"):
        totals("<html>not metrics</html>")
