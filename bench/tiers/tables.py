"""The tables of a report, from summaries alone; the README takes the same ones."""

from __future__ import annotations

from typing import Any

from bench.lab.arms import title
from bench.lab.table import Table, ms, points, ratio

Summary = dict[str, Any]


def same_tokens(summary: Summary) -> Table:
    """Same tokens: bytes of L2 for the same tokens."""
    return Table(
        ("L2", "tokens", "bytes per token", "L2 bytes", "of BF16", "hit ratio", "restored tokens"),
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
    """Same bytes: what each arm did with the same bytes."""
    rows = []
    for name, arm in summary["arms"].items():
        restore = arm["restore_ms_per_1000_tokens"]
        rows.append(
            (
                title(name),
                f"{arm['l2_tokens']:,}",
                f"{arm['hit_ratio']:.1%}",
                f"{arm['device']:.1%} / {arm['host']:.1%}",
                ms(arm["ttft_ms"]["mean"]),
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
            *("TPOT (ms)", "ITL p99 (ms)", "output tok/s", "restored tokens per run"),
            "restore ms per 1,000 tokens",
        ),
        rows,
    )


def l3(summary: Summary) -> Table:
    """The same bytes of a disk: what each arm kept there, hit and wrote."""
    arms = summary["arms"]
    stock = arms["bf16"]["disk"]
    rows = []
    for name, arm in arms.items():
        disk, pooled = arm["disk"], summary["pooled"].get(name)
        tiers = " / ".join(f"{arm[tier]:.1%}" for tier in ("device", "host", "storage"))
        rows.append(
            (
                title(name),
                f"{arm['l2_tokens']:,}",
                f"{disk['page_bytes']:,}",
                f"{disk['page_bytes'] / stock['page_bytes']:.3f}",
                f"{disk['cap_tokens']:,}",
                f"{disk['held_tokens']:,.0f}",
                f"{arm['hit_ratio']:.1%}",
                tiers,
                ms(arm["ttft_ms"]["mean"]),
                ratio(pooled["ttft_ratio"]) if pooled else "1",
                f"{disk['written_bytes'] / 1e9:.3g} GB",
                f"{disk['fetched_bytes'] / 1e9:.3g} GB",
            )
        )
    return Table(
        (
            *("L2 and L3", "L2 tokens", "B per page", "of BF16's", "the disk holds (tokens)"),
            *("held at the end", "hit ratio", "L1 / L2 / L3", "TTFT mean (ms)", "of BF16's"),
            *("written per run", "fetched per run"),
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
            points(pooled["hit_gain_points"]),
            "",
            ratio(pooled["ttft_ratio"]),
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
                points(row["hit_gain_points"]),
                f"{row['bf16_ttft_ms']:.0f} → {row['ttft_ms']:.0f}",
                ratio(row["ttft_ratio"]),
            )
            for row in summary["rows"]
        ]
        + [
            ("all that fit, pooled", title(arm), "", "", "yes", "", "", "", ratio(fitting))
            for arm, fitting in summary["fits_ttft_ratio"].items()
        ],
    )
