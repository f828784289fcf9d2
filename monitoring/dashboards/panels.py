"""What every panel of ours has: a description, a unit, thresholds, one colour for each arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from grafana_foundation_sdk.builders import (
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    timeseries,
)
from grafana_foundation_sdk.models.common import (
    AxisPlacement,
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    DataSourceRef,
    GraphThresholdsStyleMode,
    LegendDisplayMode,
    LegendPlacement,
    LineInterpolation,
    SortOrder,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardSpecialValueMapOptions,
    DynamicConfigValue,
    FieldColorModeId,
    SpecialValueMap,
    SpecialValueMatch,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

DATASOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

#: Control and treatment look the same on every panel.
ARM_COLOURS = {"bf16": "#5794F2", "int8": "#FF9830"}

GOOD, FAIR, BAD, PLAIN = "green", "yellow", "red", "text"

Query = tuple[str, str]
Steps = Sequence[tuple[float | None, str]]

P = TypeVar("P", timeseries.Panel, stat.Panel, heatmap.Panel)


def _dress(panel: P, title: str, text: str, queries: Sequence[Query], unit: str, steps: Steps) -> P:
    panel.title(title).description(text).datasource(DATASOURCE).unit(unit)
    panel.thresholds(
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value=value, color=colour) for value, colour in steps])
    )
    for number, (expression, legend) in enumerate(queries):
        panel.with_target(
            prometheus.Dataquery()
            .datasource(DATASOURCE)
            .expr(expression)
            .legend_format(legend)
            .range()
            .ref_id(chr(ord("A") + number))
        )
    return panel


def _fixed(colour: str) -> DynamicConfigValue:
    return DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})


def lines(
    title: str,
    text: str,
    queries: Sequence[Query],
    unit: str,
    *,
    limit: float | None = None,
    steps: Steps | None = None,
    no_value: str = "nothing yet",
    top: float | None = None,
    at_least: float | None = None,
    dashed: str = "",
) -> timeseries.Panel:
    """Lines over time from zero up; dashed where their name matches ``dashed`` (a /pattern/).

    The axis ends at ``top``, or where the data does but not below ``at_least``: a line of zeros
    would otherwise get an axis of no meaning.
    ``steps`` beyond the first are drawn as lines across; ``limit`` is short for a single red one.
    """
    if steps is None:
        steps = [(None, GOOD)] if limit is None else [(None, GOOD), (limit, BAD)]
    panel = _dress(timeseries.Panel(), title, text, queries, unit, steps)
    panel.no_value(no_value).min(0)
    if top is not None:
        panel.max(top)
    if at_least is not None:
        panel.axis_soft_max(at_least)
    panel.line_interpolation(LineInterpolation.LINEAR).line_width(2).fill_opacity(4)
    panel.show_points(VisibilityMode.NEVER).span_nulls(False)
    panel.axis_placement(AxisPlacement.AUTO)
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
    shown = len(steps) > 1
    panel.thresholds_style(
        common.GraphThresholdsStyleConfig().mode(
            GraphThresholdsStyleMode.DASHED if shown else GraphThresholdsStyleMode.OFF
        )
    )
    panel.legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs(["lastNotNull"])
    )
    panel.tooltip(
        common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    )
    for arm, colour in ARM_COLOURS.items():
        panel.override_by_regexp(f"/^{arm}\\b/", [_fixed(colour)])
    if dashed:
        dash = {"fill": "dash", "dash": [8, 6]}
        panel.override_by_regexp(dashed, [DynamicConfigValue("custom.lineStyle", dash)])
    return panel


def number(
    title: str,
    text: str,
    queries: Sequence[Query],
    unit: str,
    steps: Steps,
    *,
    decimals: int | None = None,
    no_value: str = "–",
    states: dict[str, tuple[str, str]] | None = None,
    colour: BigValueColorMode = BigValueColorMode.VALUE,
    graph: bool = False,
    names_only: bool = False,
) -> stat.Panel:
    """Big numbers: the last value of each query. ``states`` names values: {"1": ("up", GOOD)}.

    ``names_only`` shows what the series are called in the place of their values.
    """
    panel = _dress(stat.Panel(), title, text, queries, unit, steps)
    panel.no_value(no_value).color_mode(colour)
    panel.color_scheme(dashboard.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    panel.graph_mode(BigValueGraphMode.AREA if graph else BigValueGraphMode.NONE)
    several = len(queries) > 1 or "{{" in queries[0][1]
    shown = BigValueTextMode.VALUE_AND_NAME if several else BigValueTextMode.VALUE
    panel.text_mode(BigValueTextMode.NAME if names_only else shown)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False).fields(""))
    if decimals is not None:
        panel.decimals(decimals)
    mappings: list[ValueMapping] = [
        SpecialValueMap(
            options=DashboardSpecialValueMapOptions(
                match=SpecialValueMatch.NULL_AND_NAN,
                result=ValueMappingResult(text=no_value, color=PLAIN),
            )
        )
    ]
    if states:
        results = {
            value: ValueMappingResult(text=name, color=shade)
            for value, (name, shade) in states.items()
        }
        mappings.insert(0, ValueMap(options=results))
    panel.mappings(mappings)
    return panel


def heat(title: str, text: str, expression: str, unit: str, *, no_value: str) -> heatmap.Panel:
    """A Prometheus histogram over time, one row a bucket."""
    panel = _dress(heatmap.Panel(), title, text, [], unit, [(None, GOOD)])
    panel.targets(
        [
            prometheus.Dataquery()
            .datasource(DATASOURCE)
            .expr(expression)
            .legend_format("{{le}}")
            .format(PromQueryFormat.HEATMAP)
            .range()
            .ref_id("A")
        ]
    )
    panel.no_value(no_value).calculate(False)
    panel.y_axis(heatmap.YAxisConfig().unit(unit).axis_placement(AxisPlacement.LEFT))
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(HeatmapColorMode.SCHEME)
        .scheme("Oranges")
        .steps(64)
        .exponent(0.5)
    )
    panel.cell_gap(1).show_legend()
    panel.filter_values(heatmap.FilterValueRange().le(1e-9))
    return panel
