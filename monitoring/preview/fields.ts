// Turns a panel's configuration and Prometheus's answers into Grafana's data frames.
import {
  type DataFrame, type DisplayValue, type Field, type FieldConfig, FieldType, type GrafanaTheme2,
  getDisplayProcessor, getMinMaxAndDelta, stringToJsRegex,
} from '@grafana/data';

export interface Series { name: string; ref: string; times: number[]; values: (number | null)[] }
export interface PanelModel {
  id: number; title: string; description: string; type: string;
  gridPos: { x: number; y: number; w: number; h: number };
  options: any; // each panel type has its own
  fieldConfig: { defaults: FieldConfig; overrides: any[] };
}

// Grafana's own core does this with registries that it fills at start; without it, the overrides
// that our dashboards use (by name pattern: a colour, a dash) are applied here.
function configOf(panel: PanelModel, name: string): FieldConfig {
  const config: any = structuredClone(panel.fieldConfig.defaults);
  config.custom = { ...config.custom };
  for (const override of panel.fieldConfig.overrides) {
    if (!stringToJsRegex(override.matcher.options).test(name)) {
      continue;
    }
    for (const { id, value } of override.properties) {
      const custom = id.startsWith('custom.');
      (custom ? config.custom : config)[custom ? id.slice('custom.'.length) : id] = value;
    }
  }
  return config;
}

export function framesOf(panel: PanelModel, series: Series[], theme: GrafanaTheme2): DataFrame[] {
  return series.map((one, index) => {
    const time: Field = { name: 'Time', type: FieldType.time, values: one.times, config: {} };
    const value: Field = {
      name: one.name,
      type: FieldType.number,
      values: one.values,
      config: { ...configOf(panel, one.name), displayName: one.name },
      state: { seriesIndex: index },
    };
    value.state!.range = getMinMaxAndDelta(value);
    for (const field of [time, value]) {
      field.display = getDisplayProcessor({ field, theme, timeZone: 'utc' });
    }
    return { name: one.name, refId: one.ref, length: one.times.length, fields: [time, value] };
  });
}

export function lastNotNull(field: Field): number | null {
  return field.values.findLast((value) => value !== null && !Number.isNaN(value)) ?? null;
}

export function shown(field: Field): DisplayValue {
  return field.display!(lastNotNull(field));
}
