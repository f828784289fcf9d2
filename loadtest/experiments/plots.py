"""The plots of a report, as SVG, from summaries alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    import matplotlib as mpl
except ModuleNotFoundError:
    sys.exit("HiQCache's reports draw with matplotlib: pip install '.[bench]' in this Python.")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.experiments.summaries import QUANTILES
from loadtest.experiments.tables import title

Summary = dict[str, Any]

_COLOURS = {
    "bf16": "#7f7f7f",
    "mover": "#bcbd22",
    "int8": "#1f77b4",
    "int8-rot": "#2ca02c",
    "fp8": "#d62728",
}


def _save(figure: Figure, file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    # No date and fixed ids: the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "hiqcache", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return file


def same_bytes(summary: Summary, file: Path) -> Path:
    """Hit ratio by tier, and the distribution of TTFT."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = list(summary["arms"])
    device = [100 * summary["arms"][name]["device"] for name in names]
    host = [100 * summary["arms"][name]["host"] for name in names]
    labels = [title(name) for name in names]
    left.bar(labels, device, color="#c7c7c7", label="from L1")
    left.bar(labels, host, bottom=device, color=[_COLOURS[n] for n in names], label="from L2")
    left.set_ylabel("prompt tokens from cache (%)")
    left.tick_params(axis="x", labelsize=7)
    left.legend(loc="upper left")
    for name in names:
        right.plot(
            summary["arms"][name]["ttft_quantiles_ms"],
            QUANTILES,
            color=_COLOURS[name],
            label=title(name),
        )
    _label(right, "TTFT (ms)", "requests (%)")
    return _save(figure, file)


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
                    color=_COLOURS[arm],
                    label=title(arm),
                )
                axis.set_xscale("log", base=2)
                axis.set_xticks(x, [f"{value:.3g}" if value < 10 else f"{value:,}" for value in x])
                axis.tick_params(axis="x", labelsize=7)
        _label(axes[0, column], label, "hit ratio gain (points)")
        _label(axes[1, column], label, "mean TTFT over BF16's")
        axes[0, column].axhline(0, color="black", linewidth=0.5)
        axes[1, column].axhline(1, color="black", linewidth=0.5)
    return _save(figure, file)


def same_tokens(summary: Summary, file: Path) -> Path:
    """Bytes of L2 for the same tokens."""
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    rows = summary["rows"]
    axis.barh(
        [title(row["arm"]) for row in rows],
        [row["l2_bytes"] / 1e9 for row in rows],
        color=[_COLOURS[row["arm"]] for row in rows],
    )
    axis.invert_yaxis()
    axis.set_xlabel(f"GB of L2 for {rows[0]['l2_tokens']:,} tokens")
    return _save(figure, file)


def traces(summaries: Sequence[Summary], file: Path) -> Path:
    """Hit ratio against bytes of L2, a panel a trace."""
    figure = Figure(figsize=(5 * len(summaries), 3.6), layout="constrained")
    panels = figure.subplots(1, len(summaries), squeeze=False)[0]
    for axis, summary in zip(panels, summaries, strict=True):
        for codec in dict.fromkeys(row["codec"] for row in summary["rows"]):
            rows = [row for row in summary["rows"] if row["codec"] == codec]
            axis.plot(
                [row["l2_bytes"] / 1e9 for row in rows],
                [100 * row["hit_ratio"] for row in rows],
                marker=".",
                color=_COLOURS[codec],
                label=title(codec),
            )
        axis.axhline(100 * summary["unbounded"]["hit_ratio"], color="black", linewidth=0.5)
        axis.set_xscale("log")
        axis.set_title(summary["trace"])
        _label(axis, "L2 (GB)", "prompt tokens from cache (%)")
    return _save(figure, file)


def _label(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
