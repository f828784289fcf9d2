"""A table of text, and how figures with their intervals are written in one."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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


def ms(interval: Mapping[str, float]) -> str:
    """Milliseconds and their interval."""
    return f"{interval['value']:.0f} ({interval['low']:.0f}–{interval['high']:.0f})"


def ratio(interval: Mapping[str, float]) -> str:
    """A quotient and its interval."""
    return f"{interval['value']:.3f} ({interval['low']:.3f}–{interval['high']:.3f})"


def points(interval: Mapping[str, float]) -> str:
    """A difference in percentage points and its interval."""
    return f"{interval['value']:+.1f} ({interval['low']:+.1f} to {interval['high']:+.1f})"
