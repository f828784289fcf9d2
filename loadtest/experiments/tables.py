"""The tables of a report, from summaries alone; the README takes the same ones."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.experiments.arms import ARMS
from loadtest.experiments.environment import hardware

Summary = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table; cells are text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """As a GitHub table."""
        lines = [self.header, ["---"] * len(self.header), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def html(self) -> str:
        """As an HTML table."""

        def row(cells: Sequence[str], tag: str) -> str:
            inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
            return f"<tr>{inside}</tr>"

        body = "\n".join(row(cells, "td") for cells in self.rows)
        return f"<table>\n{row(self.header, 'th')}\n{body}\n</table>"


def same_tokens(summary: Summary) -> Table:
    """Experiment A: bytes of L2 for the same tokens."""
    return Table(
        ("L2", "tokens", "B a token", "L2 bytes", "of BF16", "hit ratio", "restored tokens"),
        [
            (
                title(row["arm"]),
                f"{row['l2_tokens']:,}",
                f"{row['bytes_per_token']:,}",
                f"{row['l2_bytes'] / 1e9:.3f} GB",
                f"{row['share_of_bf16']:.2%}",
                f"{row['hit_ratio']:.2%}",
                f"{row['restored_tokens']:,.0f}",
            )
            for row in summary["rows"]
        ],
    )


def same_bytes(summary: Summary) -> Table:
    """Experiment B: what each arm did with the same bytes."""
    rows = []
    for name, arm in summary["arms"].items():
        restore = arm["restore_ms_per_1000_tokens"]
        rows.append(
            (
                title(name),
                f"{arm['l2_tokens']:,}",
                f"{arm['hit_ratio']:.1%}",
                f"{arm['device']:.1%} / {arm['host']:.1%}",
                _ms(arm["ttft_ms"]["mean"]),
                f"{arm['ttft_ms']['p50']['value']:.0f}",
                f"{arm['ttft_ms']['p99']['value']:.0f}",
                "–" if arm["tpot_ms"] is None else f"{arm['tpot_ms']['mean']['value']:.1f}",
                "–" if arm["itl_ms"] is None else f"{arm['itl_ms']['p99']['value']:.1f}",
                f"{arm['output_tokens_per_s']:.0f}",
                f"{arm['restored_tokens'] / arm['runs']:,.0f}",
                "–" if restore is None else f"{restore:.2f}",
            )
        )
    return Table(
        (
            *("L2", "L2 tokens", "hit ratio", "L1 / L2", "TTFT mean (ms)", "p50", "p99"),
            *("TPOT (ms)", "ITL p99 (ms)", "output tok/s", "restored tokens a run"),
            "restore ms per 1,000 tokens",
        ),
        rows,
    )


def pairs(summary: Summary) -> Table:
    """Each pair of runs, and all of them pooled, against BF16."""
    rows = [
        (
            title(pair["arm"]),
            str(pair["repeat"] + 1),
            f"{pair['bf16_hit_ratio']:.1%} → {pair['hit_ratio']:.1%}",
            f"{pair['hit_gain_points']:+.1f}",
            f"{pair['bf16_ttft_ms']:.0f} → {pair['ttft_ms']:.0f}",
            f"{pair['ttft_ratio']:.3f}",
            f"{pair['throughput_ratio']:.3f}",
        )
        for pair in summary["pairs"]
    ]
    rows += [
        (
            title(arm),
            "pooled",
            "",
            _points(pooled["hit_gain_points"]),
            "",
            _ratio(pooled["ttft_ratio"]),
            "",
        )
        for arm, pooled in summary["pooled"].items()
    ]
    return Table(
        (
            *("against BF16", "pair", "hit ratio", "gain (points)", "mean TTFT (ms)"),
            *("TTFT ratio", "throughput ratio"),
        ),
        rows,
    )


def sweep(summary: Summary) -> Table:
    """Where the gain starts and where it ends."""
    return Table(
        (
            *("point", "against BF16", "prefixes", "of BF16's capacity", "all fits"),
            *("hit ratio", "gain (points)", "mean TTFT (ms)", "TTFT ratio"),
        ),
        [
            (
                row["point"],
                title(row["arm"]),
                f"{row['groups']} × {row['prefix']:,}",
                f"{row['prefix_share']:.2f}",
                "yes" if row["fits"] else "no",
                f"{row['bf16_hit_ratio']:.1%} → {row['hit_ratio']:.1%}",
                _points(row["hit_gain_points"]),
                f"{row['bf16_ttft_ms']:.0f} → {row['ttft_ms']:.0f}",
                _ratio(row["ttft_ratio"]),
            )
            for row in summary["rows"]
        ]
        + [
            ("all that fit, pooled", title(arm), "", "", "yes", "", "", "", _ratio(ratio))
            for arm, ratio in summary["fits_ttft_ratio"].items()
        ],
    )


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
            f"{summary['requests']}, {summary['block_tokens']} tokens a block, "
            f"{summary['max_input_tokens']:,} at most",
            f"{row['l1_tokens']:,}",
            title(row["arm"]),
            f"{row['l2_tokens']:,}",
            f"{row['hit_ratio']:.1%}",
            f"{row['simulated_hit_ratio']:.1%}",
            f"{row['requests_as_simulated']} of {summary['requests']}",
            _ms(row["ttft_ms"]),
            f"{row['ttft_ratio']['value']:.3f} ({row['ttft_ratio']['low']:.3f}–"
            f"{row['ttft_ratio']['high']:.3f})",
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


def made_with(setup: dict[str, Any]) -> str:
    """What made a figure, in a sentence."""
    environment = setup["environment"]
    versions = environment["versions"]
    dummy = ", dummy weights" if setup["dummy_weights"] else ""
    return (
        f"Made by `{setup['command']}` with {setup['model']}{dummy} on {hardware(environment)}; "
        f"SGLang {versions['sglang']}, torch {versions['torch']}, HiQCache {versions['hiqcache']} "
        f"({environment['commit'] or 'no commit'}), {environment['time']}."
    )


def title(arm: str) -> str:
    """An arm's name in a table."""
    return ARMS[arm].title


def _ms(interval: dict[str, float]) -> str:
    return f"{interval['value']:.0f} ({interval['low']:.0f}–{interval['high']:.0f})"


def _ratio(interval: dict[str, float]) -> str:
    return f"{interval['value']:.3f} ({interval['low']:.3f}–{interval['high']:.3f})"


def _points(interval: dict[str, float]) -> str:
    return f"{interval['value']:+.1f} ({interval['low']:+.1f} to {interval['high']:+.1f})"
