"""A soak's counts, in Markdown, from its file alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.lab.environment import hardware
from bench.lab.table import Table


def table(document: Mapping[str, Any]) -> Table:
    """What each arm went through, in all sessions."""
    rows = []
    for name, arm in document["arms"].items():
        counts = arm["counts"]
        # The pool counts what it compared, the server what its cache report said.
        tokens = counts.get("checked_tokens", counts.get("restored_tokens", 0))
        rows.append(
            (
                name,
                f"{counts.get('checked_restores', 0):,}",
                f"{tokens:,}",
                f"{counts['checksum_records']:,}" if counts.get("checksum_records") else "–",
                str(len(arm["faults"])),
                f"{arm['seconds']:,.0f}",
            )
        )
    return Table(
        (
            *("arm", "restores checked", "tokens of them", "sums of records checked"),
            *("wrong", "seconds"),
        ),
        rows,
    )


def markdown(document: Mapping[str, Any]) -> str:
    """The table, and what made it."""
    lines = [f"# Soak of a {document['mode']}", "", table(document).markdown(), ""]
    for session in document["sessions"]:
        made = session["environment"]
        versions = made["versions"]
        lines += [
            f"- `{session['command']}` on {hardware(made)}; SGLang {versions['sglang']}, torch "
            f"{versions['torch']} ({made['commit']}), {made['time']}."
        ]
    return "\n".join(lines) + "\n"
