"""The dashboards as TypeScript, for a check of every field against Grafana's own schema.

`tsc --strict` then rejects unknown fields, wrong types and values that no enumeration has, of the
dashboard and of each panel type's options and custom fields.
"""

from __future__ import annotations

import json
from typing import Any

_PANEL_TYPES = {"timeseries": "TimeSeries", "stat": "Stat", "heatmap": "Heatmap"}

_HEAD = """\
import type { AnnotationQuery, DataQuery, Dashboard, Panel } from '@grafana/schema';
%(imports)s

// JSON holds an enumeration's values where the schema names its members.
type Plain<T> = T extends string ? `${T}`
  : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> }
  : T;
// Prometheus's own fields, which the general types leave to the data source.
type PromQuery = DataQuery & {
  expr: string; legendFormat?: string; range?: boolean; instant?: boolean; interval?: string;
  format?: 'time_series' | 'table' | 'heatmap';
};
type PromAnnotation = AnnotationQuery<PromQuery> & { titleFormat?: string };
type PanelOf<O, F> = Omit<Panel<O, F>, 'targets' | 'options'> & {
  targets: PromQuery[]; options: O;
};
type Board = Omit<Dashboard, 'panels' | 'annotations'> & {
  panels: (%(panels)s)[]; annotations: { list: PromAnnotation[] };
};
"""


def typescript(dashboards: dict[str, dict[str, Any]]) -> str:
    """A module that holds each of ``dashboards`` as a constant of the schema's type."""
    imports, panels = [], []
    for kind, name in _PANEL_TYPES.items():
        source = (
            f"@grafana/schema/dist/esm/raw/composable/{kind}/panelcfg/x/{name}PanelCfg_types.gen"
        )
        fields = ", type FieldConfig as " + name + "Fields" if kind != "stat" else ""
        imports.append(f"import {{ type Options as {name}Options{fields} }} from '{source}';")
        custom = f"{name}Fields" if fields else "Record<string, never>"
        panels.append(f"PanelOf<{name}Options, {custom}> & {{ type: '{kind}' }}")
    parts = [_HEAD % {"imports": "\n".join(imports), "panels": " | ".join(panels)}]
    for number, dashboard in enumerate(dashboards.values()):
        text = json.dumps(dashboard, indent=1, ensure_ascii=False)
        parts.append(f"export const dashboard{number}: Plain<Board> = {text};")
    return "\n".join(parts) + "\n"
