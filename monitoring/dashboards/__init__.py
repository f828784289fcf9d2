"""Grafana dashboards as code; the JSON beside them is made by `python -m monitoring.dashboards`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from monitoring.dashboards import ab_overview, l2_detail, load

#: Where Grafana's provisioning reads them.
FOLDER = Path(__file__).resolve().parent.parent / "grafana" / "dashboards"


def dashboards() -> dict[str, dict[str, Any]]:
    """Every dashboard as the JSON that Grafana reads, by file name without its suffix."""
    built = (ab_overview.build(), l2_detail.build(), load.build())
    encoded = [json.loads(JSONEncoder(sort_keys=True).encode(dashboard)) for dashboard in built]
    for dashboard in encoded:
        for number, panel in enumerate(dashboard["panels"], start=1):
            panel["id"] = number
        for variable in dashboard["templating"]["list"]:
            # The SDK writes interval variables' defaults on every kind; the schema knows no such.
            for name in ("auto", "auto_count", "auto_min"):
                variable.pop(name, None)
    return {str(dashboard["uid"]): dashboard for dashboard in encoded}


def text_of(dashboard: dict[str, Any]) -> str:
    """The text of a dashboard's file."""
    return json.dumps(dashboard, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
