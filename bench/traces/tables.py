"""The tables of simulated and replayed traces, from summaries alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.lab.arms import title
from bench.lab.table import Table, ms, ratio

Summary = dict[str, Any]


def traces(summaries: Sequence[Summary]) -> Table:
    """Hit ratio of each codec at a few sizes of L2, trace by trace."""
    rows = []
    for summary in summaries:
        sizes = sorted({row["l2_bytes"] for row in summary["rows"]})
        for size in sizes[::2]:
            by_codec = {row["codec"]: row for row in summary["rows"] if row["l2_bytes"] == size}
            gain = by_codec["int8"]["hit_ratio"] - by_codec["bf16"]["hit_ratio"]
            rows.append(
                (
                    summary["trace"],
                    f"{size / 1e9:,.0f} GB",
                    *(f"{row['hit_ratio']:.1%}" for row in by_codec.values()),
                    f"{100 * gain:+.1f}",
                )
            )
    codecs = dict.fromkeys(row["codec"] for row in summaries[0]["rows"])
    return Table(("trace", "L2", *(title(codec) for codec in codecs), "int8's gain (points)"), rows)


def replays(summaries: Sequence[Summary]) -> Table:
    """Hits and TTFT of each arm on real servers, beside the simulation's hits."""
    rows = [
        (
            summary["replayed"],
            f"{summary['requests']}, {summary['block_tokens']} tokens per block, "
            f"{summary['max_input_tokens']:,} at most",
            f"{row['l1_tokens']:,}",
            title(row["arm"]),
            f"{row['l2_tokens']:,}",
            f"{row['hit_ratio']:.1%}",
            f"{row['simulated_hit_ratio']:.1%}",
            f"{row['requests_as_simulated']} of {summary['requests']}",
            ms(row["ttft_ms"]),
            ratio(row["ttft_ratio"]),
        )
        for summary in summaries
        for row in summary["rows"]
    ]
    return Table(
        (
            *("trace", "requests", "L1 tokens", "L2", "L2 tokens", "hit ratio", "simulated"),
            "as simulated",
            *("mean TTFT (ms)", "TTFT ratio"),
        ),
        rows,
    )
