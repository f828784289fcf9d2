"""The plot of simulated traces, as SVG, from summaries alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lab.arms import title
from bench.lab.plots import Figure, colour_of, name_axes, save

Summary = dict[str, Any]


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
                color=colour_of(codec),
                label=title(codec),
            )
        axis.axhline(100 * summary["unbounded"]["hit_ratio"], color="black", linewidth=0.5)
        axis.set_xscale("log")
        axis.set_title(summary["trace"])
        name_axes(axis, "L2 (GB)", "prompt tokens from cache (%)")
    return save(figure, file)
