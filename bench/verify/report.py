"""The counts of a verification, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.lab.table import Table


def table(result: Mapping[str, Any]) -> Table:
    """What running servers held, and what their restores answered; an unfinished arm shows."""
    rows = []
    for arm, found in result["arms"].items():
        exact, pressure = found["exact"], found.get("pressure")
        rows.append(
            (
                arm,
                f"{found['capacity']['host_total_tokens']:,.0f}",
                f"{exact['equal']} of {exact['compared']}",
                *(
                    (
                        f"{pressure['requests']:,}",
                        f"{pressure['restored_requests']:,}",
                        str(pressure["mismatches"]),
                        f"{pressure['largest_change_restored']:.2f}",
                        f"{pressure['bound']:.2f}",
                    )
                    if pressure
                    else ("not finished", *"––––")
                ),
            )
        )
    return Table(
        (
            *("arm", "L2 tokens", "restored answers bit-equal to L1 hits"),
            *("requests under pressure", "of them restored", "mismatches"),
            *("largest change of a log-probability", "would be seen from"),
        ),
        rows,
    )
