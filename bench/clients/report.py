"""A client's figures beside the recorder's, in Markdown, from the file of results alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.lab.table import Table

#: Figures in the order of the columns: name in the file, title, factor to the title's unit, format.
_FIGURES = (
    ("ttft_s", "TTFT p50 (ms)", 1e3, ".1f"),
    ("tpot_s", "TPOT p50 (ms)", 1e3, ".2f"),
    ("cached_tokens", "cached tokens", 1, ",.0f"),
)


def table(document: Mapping[str, Any]) -> Table:
    """Each client against each arm: what it says, what the recorder saw, and how far apart."""
    rows = []
    for arm, clients in document["arms"].items():
        for client, figures in clients.items():
            requests = figures["requests"]
            row = [arm, client, f"{requests['client']:.0f} of {requests['recorder']:.0f}"]
            for name, _, scale, form in _FIGURES:
                found = figures.get(name)
                row.append(_cell(found, scale, form) if found else "–")
            rows.append(row)
    return Table(
        ("arm", "client", "requests", *(f"{title}: client / ours" for _, title, *_ in _FIGURES)),
        rows,
    )


def _cell(found: Mapping[str, Any], scale: float, form: str) -> str:
    theirs, ours = (float(found[who]) for who in ("client", "recorder"))
    apart = f" ({theirs / ours - 1:+.1%})" if theirs != ours else ""
    return f"{theirs * scale:{form}} / {ours * scale:{form}}{apart}"
