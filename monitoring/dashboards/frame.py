"""What every dashboard of ours has: variables, load annotations, refresh, links to the others."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, prometheus
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    VariableOption,
    VariableRefresh,
    VariableSort,
)

from monitoring.dashboards.panels import DATASOURCE

TAG = "hiqcache"


def frame(uid: str, title: str, text: str) -> dashboard.Dashboard:
    """An empty dashboard with the data source variable and the load annotations."""
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


ARM = ("arm", "Arm", "arm_model:served:zero", "arm")
MODEL = ("model", "Model", "arm_model:served:zero", "model_name")
RANK = ("rank", "TP rank", "hiqcache_l2_capacity_tokens", "tp_rank")


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
