"""What every dashboard of ours has: variables, load annotations, refresh, links to the others."""

from __future__ import annotations

from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    GridPos,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from monitoring.dashboards.panels import DATASOURCE

TAG = "hiqcache"

#: The series of the arms, models and ranks that are chosen on a dashboard.
ARMS = 'arm=~"$arm", model_name=~"$model"'
RANKS = f'{ARMS}, tp_rank=~"$rank"'

#: Columns of Grafana's grid.
COLUMNS = 24

Panel = heatmap.Panel | stat.Panel | timeseries.Panel


class Row(NamedTuple):
    """Panels side by side, of one width; ``height`` in Grafana's units of 30 pixels."""

    height: int
    panels: tuple[Panel, ...]


def row(height: int, *panels: Panel) -> Row:
    """A row of ``panels``. Raises ValueError where they cannot share the width evenly."""
    if not panels or COLUMNS % len(panels):
        raise ValueError(f"{len(panels)} panels do not share {COLUMNS} columns evenly")
    return Row(height, panels)


def in_rows(board: dashboard.Dashboard, *rows: Row) -> dashboard.Dashboard:
    """``board`` with ``rows`` below each other, from the top."""
    top = 0
    for height, panels in rows:
        width = COLUMNS // len(panels)
        for number, panel in enumerate(panels):
            panel.grid_pos(GridPos(x=number * width, y=top, w=width, h=height))
            board = board.with_panel(panel)
        top += height
    return board


def frame(uid: str, title: str, text: str) -> dashboard.Dashboard:
    """An empty dashboard with the load annotations, and variables for source, arm, model, rank."""
    links = (
        dashboard.DashboardLink("HiQCache")
        .type(DashboardLinkType.DASHBOARDS)
        .tags([TAG])
        .as_dropdown(False)
        .include_vars(True)
        .keep_time(True)
    )
    return (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(text)
        .tags([TAG, "sglang"])
        .readonly()
        .refresh("5s")
        .time("now-15m", "now")
        .timezone("browser")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(links)
        .annotation(_load_runs())
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(choice("arm", "Arm", "arm_model:served:zero", "arm"))
        .with_variable(choice("model", "Model", "arm_model:served:zero", "model_name"))
        .with_variable(choice("rank", "TP rank", "hiqcache_l2_capacity_tokens", "tp_rank"))
    )


def choice(name: str, label: str, metric: str, field: str) -> dashboard.QueryVariable:
    """A variable with every value of label ``field`` on ``metric``; all of them to begin with."""
    query = f"label_values({metric}, {field})"
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": f"variable-{name}"})
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _load_runs() -> dashboard.AnnotationQuery:
    annotation = (
        dashboard.AnnotationQuery()
        .name("Load runs")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("purple")
        .target(
            prometheus.Dataquery()
            .datasource(DATASOURCE)
            .expr("max by (workload) (hiqcache_load_running) > 0")
            .interval("5s")
            .ref_id("Anno")
        )
    )
    annotation.build().title_format = "load: {{workload}}"
    return annotation
