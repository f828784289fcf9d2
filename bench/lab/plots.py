"""How plots look, and how they are saved: as SVG, the same figures as the same file."""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import matplotlib as mpl
except ModuleNotFoundError:
    sys.exit("HiQCache's reports draw with matplotlib: pip install '.[bench]' in this Python.")
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["COLOURS", "Axes", "Figure", "name_axes", "save"]

#: By arm.
COLOURS = {
    "bf16": "#7f7f7f",
    "mover": "#bcbd22",
    "int8": "#1f77b4",
    "int8-rot": "#2ca02c",
    "fp8": "#d62728",
}


def save(figure: Figure, file: Path) -> Path:
    """Write ``figure`` to ``file``, and return that."""
    file.parent.mkdir(parents=True, exist_ok=True)
    # No date and fixed ids: the same figures give the same file.
    with mpl.rc_context({"svg.hashsalt": "hiqcache", "svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata={"Date": None}, bbox_inches="tight")
    return file


def name_axes(axis: Axes, x: str, y: str) -> None:
    """Name both axes, and show a grid and a legend."""
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
