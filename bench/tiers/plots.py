"""The plots of a report, as SVG, from summaries alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.lab.arms import title
from bench.lab.plots import Figure, colour_of, name_axes, save
from bench.tiers.summaries import QUANTILES

Summary = dict[str, Any]


def same_bytes(summary: Summary, file: Path) -> Path:
    """Hit ratio by tier, and the distribution of TTFT."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(summary["arms"])
    device = [100 * summary["arms"][name]["device"] for name in names]
    host = [100 * summary["arms"][name]["host"] for name in names]
    labels = [title(name) for name in names]
    left.bar(labels, device, color="#c7c7c7", label="from L1")
    left.bar(labels, host, bottom=device, color=[colour_of(n) for n in names], label="from L2")
    if any(storage := [100 * summary["arms"][name].get("storage", 0.0) for name in names]):
        below = [sum(tiers) for tiers in zip(device, host, strict=True)]
        left.bar(labels, storage, bottom=below, color="#7a5195", label="from L3")
    left.set_ylabel("prompt tokens from cache (%)")
    left.tick_params(axis="x", labelsize=7)
    left.legend(loc="upper left")
    for name in names:
        right.plot(
            summary["arms"][name]["ttft_quantiles_ms"],
            QUANTILES,
            color=colour_of(name),
            label=title(name),
        )
    name_axes(right, "TTFT (ms)", "requests (%)")
    return save(figure, file)


def sweep(summary: Summary, file: Path) -> Path:
    """Gain in hit ratio and TTFT ratio over the working set, and over the prefix length."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    axes = figure.subplots(2, 2)
    for column, (kind, key, label) in enumerate(
        (
            ("share", "prefix_share", "prefixes over BF16's L2 capacity"),
            ("prefix", "prefix", "prefix length (tokens)"),
        )
    ):
        for arm in dict.fromkeys(row["arm"] for row in summary["rows"]):
            rows = sorted(
                (r for r in summary["rows"] if r["arm"] == arm and r["point"].startswith(kind)),
                key=lambda row: float(row[key]),
            )
            x = [row[key] for row in rows]
            for axis, measure in zip(
                axes[:, column], ("hit_gain_points", "ttft_ratio"), strict=True
            ):
                value = [row[measure]["value"] for row in rows]
                low = [row[measure]["value"] - row[measure]["low"] for row in rows]
                high = [row[measure]["high"] - row[measure]["value"] for row in rows]
                axis.errorbar(
                    x,
                    value,
                    yerr=(low, high),
                    marker="o",
                    capsize=3,
                    color=colour_of(arm),
                    label=title(arm),
                )
                axis.set_xscale("log", base=2)
                axis.set_xticks(x, [f"{value:.3g}" if value < 10 else f"{value:,}" for value in x])
                axis.tick_params(axis="x", labelsize=7)
        name_axes(axes[0, column], label, "hit ratio gain (points)")
        name_axes(axes[1, column], label, "mean TTFT over BF16's")
        axes[0, column].axhline(0, color="black", linewidth=0.5)
        axes[1, column].axhline(1, color="black", linewidth=0.5)
    return save(figure, file)


def same_tokens(summary: Summary, file: Path) -> Path:
    """Bytes of L2 for the same tokens."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    rows = summary["rows"]
    axis.barh(
        [title(row["arm"]) for row in rows],
        [row["l2_bytes"] / 1e9 for row in rows],
        color=[colour_of(row["arm"]) for row in rows],
    )
    axis.invert_yaxis()
    axis.set_xlabel(f"GB of L2 for {rows[0]['l2_tokens']:,} tokens")
    return save(figure, file)
