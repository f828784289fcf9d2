"""The queries of a dashboard, with its variables filled in: for tests and for the preview."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

#: What Grafana puts in where "All" is chosen, and the data source.
ALL = {"arm": ".*", "model": ".*", "rank": ".*", "workload": ".*"}


class PanelQuery(NamedTuple):
    """One query of one panel."""

    panel: dict[str, Any]
    ref: str
    expression: str
    legend: str


def panel_queries(
    dashboard: Mapping[str, Any], values: Mapping[str, str] = ALL
) -> Iterator[PanelQuery]:
    """Every query of every panel. Raises KeyError for a variable without a value."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            expression = filled(target["expr"], values)
            yield PanelQuery(panel, target["refId"], expression, target["legendFormat"])


def filled(expression: str, values: Mapping[str, str] = ALL) -> str:
    """``expression`` with every $variable replaced."""
    return re.sub(r"\$\{?(\w+)\}?", lambda found: values[found[1]], expression)
