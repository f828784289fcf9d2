"""Collects what a dashboard's panels show from a live Prometheus, and has Chromium draw it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from monitoring.panel_queries import panel_queries

MONITORING = Path(__file__).resolve().parent.parent

#: Grafana draws about this wide on a common screen.
WIDTH = 1600

#: Height of a row of the grid with its gap, and of the head: as in preview.tsx.
ROW, HEAD = 38, 64

#: Steps across the picture: fine for lines, cells wide enough to see for heat maps.
STEPS = {"heatmap": 48}
MANY_STEPS = 240

QueryRange = Callable[[str, float, float, float], list[dict[str, Any]]]


class PreviewError(RuntimeError):
    """Something that the preview needs is missing or failed; the text says what to do."""


def collect(
    dashboard: dict[str, Any], query_range: QueryRange, start: float, end: float
) -> dict[str, Any]:
    """What preview.tsx draws: every panel with its series, and the load runs."""
    by_panel: dict[int, list[dict[str, Any]]] = {panel["id"]: [] for panel in dashboard["panels"]}
    for query in panel_queries(dashboard):
        step = (end - start) / STEPS.get(query.panel["type"], MANY_STEPS)
        for series in query_range(query.expression, start, end, max(step, 1.0)):
            by_panel[query.panel["id"]].append(
                {
                    "name": name_of(query.legend, series["metric"], query.panel["title"]),
                    "ref": query.ref,
                    "times": [1000 * at for at, _ in series["values"]],
                    "values": [finite(value) for _, value in series["values"]],
                }
            )
    (annotation,) = dashboard["annotations"]["list"]
    loads = [
        {"name": series["metric"].get("workload", ""), "from": first * 1000, "to": last * 1000}
        for series in query_range(annotation["target"]["expr"], start, end, 5)
        for first, last in stretches([at for at, _ in series["values"]], 5)
    ]
    variables = [
        f"{variable['label']}: {'All' if variable['type'] == 'query' else 'Prometheus'}"
        for variable in dashboard["templating"]["list"]
    ]
    return {
        "title": dashboard["title"],
        "description": dashboard["description"],
        "variables": variables,
        "from": 1000 * start,
        "to": 1000 * end,
        "width": WIDTH,
        "panels": [
            {"model": panel, "series": by_panel[panel["id"]]} for panel in dashboard["panels"]
        ],
        "loads": loads,
    }


def name_of(legend: str, labels: dict[str, str], title: str) -> str:
    """A series' name: its legend with the labels filled in, or else the panel's title."""
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend) or title


def finite(value: str) -> float | None:
    """A sample as a number; None where it is none, which leaves a gap."""
    number = float(value)
    return number if math.isfinite(number) else None


def stretches(times: list[float], step: float) -> list[tuple[float, float]]:
    """First and last of each run of ``times`` that are a ``step`` apart."""
    found: list[tuple[float, float]] = []
    for time in times:
        if found and time - found[-1][1] <= step * 1.5:
            found[-1] = (found[-1][0], time)
        else:
            found.append((time, time))
    return found


def bundle(folder: Path) -> None:
    """Build preview.js into ``folder``. Raises PreviewError."""
    tool = MONITORING / "node_modules" / ".bin" / "esbuild"
    if not tool.exists():
        raise PreviewError("run npm ci in monitoring/ first: the preview uses @grafana/ui.")
    flags = ["--bundle", "--minify", "--format=iife", "--jsx=automatic", "--log-level=error"]
    loaders = ["--loader:.svg=dataurl", "--loader:.ttf=empty"]
    production = '--define:process.env.NODE_ENV="production"'
    _run(
        [
            str(tool),
            "preview/preview.tsx",
            f"--outfile={folder / 'preview.js'}",
            *flags,
            *loaders,
            production,
        ]
    )


def draw(data: dict[str, Any], folder: Path, picture: Path) -> None:
    """Draw ``data`` into the PNG ``picture``; ``folder`` holds preview.js. Raises PreviewError."""
    browser = shutil.which("chromium")
    if browser is None:
        raise PreviewError("chromium is not installed: apt-get install chromium fonts-inter")
    page = (MONITORING / "preview" / "page.html").read_text(encoding="utf-8")
    document = folder / "page.html"
    # "</" would end the script element.
    text = json.dumps(data).replace("</", "<\\/")
    document.write_text(page.replace("/*DATA*/", text), encoding="utf-8")
    rows = max(
        panel["model"]["gridPos"]["y"] + panel["model"]["gridPos"]["h"] for panel in data["panels"]
    )
    profile = folder / "chromium"
    log = _run(
        [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *("--disable-sync", "--hide-scrollbars", f"--user-data-dir={profile}"),
            *(f"--window-size={WIDTH},{HEAD + rows * ROW + 4}", "--virtual-time-budget=8000"),
            *("--enable-logging=stderr", f"--screenshot={picture}", document.as_uri()),
        ]
    )
    faults = [line for line in log.splitlines() if "CONSOLE" in line and "Uncaught" in line]
    if faults or not picture.exists():
        raise PreviewError(f"chromium did not draw {picture}: {faults[:3] or log[-3000:]}")
    # A dashboard has few colours: a third of the bytes, and nobody sees it.
    with Image.open(picture) as drawn:
        few = drawn.convert("RGB").quantize(
            256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE
        )
    few.save(picture, optimize=True)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=MONITORING, capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise PreviewError(f"{command[0]} failed:\n{done.stderr[-3000:]}")
    return done.stderr
