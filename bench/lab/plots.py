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

from bench.lab.arms import arm_named

__all__ = ["Axes", "Figure", "colour_of", "name_axes", "save"]

#: By arm; the rest share what is left of matplotlib's own.
_COLOURS = {
    "bf16": "#7f7f7f",
    "int8:mover": "#bcbd22",
    "int8": "#1f77b4",
    "int8-rot": "#2ca02c",
    "fp8": "#d62728",
}


_OTHERS = ("#9467bd", "#8c564b", "#e377c2", "#17becf", "#ff7f0e")


def colour_of(arm: str) -> str:
    """The colour of an arm, the same in every plot."""
    name = arm_named(arm).name
    return _COLOURS.get(name) or _OTHERS[sum(name.encode()) % len(_OTHERS)]


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
