// @grafana/ui has no heat map (Grafana keeps it in its core), so the preview draws its own.
import { type GrafanaTheme2, getValueFormat, formattedValueToString } from '@grafana/data';
import type { Series } from './fields';

const AXIS = { left: 62, bottom: 22 };
// d3's Oranges, dark to light as Grafana turns it on its dark theme.
const SCHEME = ['#7f2704', '#a63603', '#e6550d', '#fd8d3c', '#fdae6b', '#fdd0a2', '#fff5eb'];

export function Heatmap(props: {
  series: Series[]; unit: string; from: number; to: number; width: number; height: number;
  theme: GrafanaTheme2;
}) {
  const { width, height, theme, from, to } = props;
  const rows = props.series
    .map((one) => ({ ...one, bound: Number(one.name.replace('+Inf', 'Infinity')) }))
    .sort((a, b) => a.bound - b.bound);
  // Prometheus counts every bucket up to its bound; a cell shows what lies between two bounds.
  const cells = rows.flatMap((row, index) =>
    row.values.map((value, at) => ({
      index,
      time: row.times[at],
      count: (value ?? 0) - (index ? (rows[index - 1].values[at] ?? 0) : 0),
    }))
  ).filter((cell) => cell.count > 1e-9);
  if (!cells.length) {
    return null;
  }
  const first = Math.max(0, Math.min(...cells.map((cell) => cell.index)) - 1);
  const last = Math.min(rows.length - 1, Math.max(...cells.map((cell) => cell.index)) + 1);
  const most = Math.max(...cells.map((cell) => cell.count));
  const plot = { width: width - AXIS.left - 8, height: height - AXIS.bottom - 8 };
  const rowHeight = plot.height / (last - first + 1);
  const step = rows[0].times.length > 1 ? rows[0].times[1] - rows[0].times[0] : to - from;
  const x = (time: number) => AXIS.left + ((time - from) / (to - from)) * plot.width;
  const y = (index: number) => 8 + (last - index) * rowHeight;
  const format = getValueFormat(props.unit);
  const colour = (count: number) =>
    SCHEME[Math.min(SCHEME.length - 1, Math.floor(Math.sqrt(count / most) * SCHEME.length))];
  const ticks = Array.from({ length: 7 }, (_, index) => from + ((to - from) * (index + 0.5)) / 7);
  return (
    <svg width={width} height={height} fontSize={12} fill={theme.colors.text.secondary}>
      {rows.slice(first, last + 1).map((row, offset) => (
        <text key={row.name} x={AXIS.left - 6} y={y(first + offset) + 4} textAnchor="end">
          {(last - first < 12 || offset % 2 === 0) && Number.isFinite(row.bound)
            ? formattedValueToString(format(row.bound))
            : ''}
        </text>
      ))}
      {cells.map((cell) => (
        <rect
          key={`${cell.index} ${cell.time}`}
          x={Math.max(AXIS.left, x(cell.time - step))} y={y(cell.index)}
          width={Math.max(1, x(cell.time) - Math.max(AXIS.left, x(cell.time - step)) - 1)}
          height={Math.max(1, rowHeight - 1)} fill={colour(cell.count)}
        />
      ))}
      {ticks.map((time) => (
        <text key={time} x={x(time)} y={height - 4} textAnchor="middle">
          {new Date(time).toISOString().slice(11, 19)}
        </text>
      ))}
    </svg>
  );
}
