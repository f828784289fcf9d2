// Draws one dashboard from data.json with Grafana's own components, at the grid Grafana uses.
import {
  createTheme, dateTime, EventBusSrv, formattedValueToString, type GrafanaTheme2, ThemeContext, type TimeRange,
} from '@grafana/data';
import {
  BigValue, type BigValueColorMode, type BigValueGraphMode, type BigValueJustifyMode,
  type BigValueTextMode, GlobalStyles, PanelChrome, PanelContextProvider, TimeSeries,
  type UPlotConfigBuilder,
} from '@grafana/ui';
import { useLayoutEffect } from 'react';
import { createRoot } from 'react-dom/client';
import { framesOf, lastNotNull, type PanelModel, type Series, shown } from './fields';
import { Heatmap } from './heatmap';

interface Preview {
  title: string; description: string; variables: string[]; from: number; to: number; width: number;
  panels: { model: PanelModel; series: Series[] }[];
  loads: { name: string; from: number; to: number }[];
}

declare const PREVIEW: Preview;

const CELL = 30, GAP = 8, HEAD = 64;
const theme: GrafanaTheme2 = createTheme({ colors: { mode: 'dark' } });
const events = new EventBusSrv();
const range: TimeRange = {
  from: dateTime(PREVIEW.from), to: dateTime(PREVIEW.to),
  raw: { from: dateTime(PREVIEW.from), to: dateTime(PREVIEW.to) },
};

function Loads({ builder }: { builder: UPlotConfigBuilder }) {
  useLayoutEffect(() => {
    builder.addHook('drawClear', (u) => {
      for (const load of PREVIEW.loads) {
        const [left, right] = [load.from, load.to].map((time) =>
          Math.min(u.bbox.left + u.bbox.width, Math.max(u.bbox.left, u.valToPos(time, 'x', true)))
        );
        u.ctx.fillStyle = 'rgba(184, 119, 217, 0.12)';
        u.ctx.fillRect(left, u.bbox.top, right - left, u.bbox.height);
        u.ctx.fillStyle = '#b877d9';
        u.ctx.fillRect(left, u.bbox.top + u.bbox.height, right - left, 3);
      }
    });
  }, [builder]);
  return null;
}

function Body({ model, series, width, height }: {
  model: PanelModel; series: Series[]; width: number; height: number;
}) {
  const frames = framesOf(model, series, theme);
  const empty = (
    <div className="empty" style={{ height }}>{model.fieldConfig.defaults.noValue}</div>
  );
  if (!frames.length) {
    return empty;
  }
  if (model.type === 'heatmap') {
    return Heatmap({
      series, unit: model.fieldConfig.defaults.unit!, from: PREVIEW.from, to: PREVIEW.to,
      width, height, theme,
    }) ?? empty;
  }
  if (model.type === 'stat') {
    const each = Math.floor(width / frames.length);
    return (
      <div style={{ display: 'flex' }}>
        {frames.map((frame) => {
          const value = shown(frame.fields[1]);
          return (
            <BigValue
              key={frame.name}
              theme={theme} width={each} height={height}
              value={frames.length > 1 || model.options.textMode === 'value_and_name'
                ? { ...value, title: frame.name } : { ...value, title: undefined }}
              colorMode={model.options.colorMode as BigValueColorMode}
              graphMode={model.options.graphMode as BigValueGraphMode}
              justifyMode={model.options.justifyMode as BigValueJustifyMode}
              textMode={model.options.textMode as BigValueTextMode}
              sparkline={model.options.graphMode === 'area'
                ? { y: frame.fields[1], x: frame.fields[0] } : undefined}
              hasLinks={false}
            />
          );
        })}
      </div>
    );
  }
  const named = frames.map((frame) => {
    const field = frame.fields[1];
    const last = lastNotNull(field);
    const text = last === null ? model.fieldConfig.defaults.noValue! : formattedValueToString(field.display!(last));
    return { ...frame, fields: [frame.fields[0], {
      ...field, config: { ...field.config, displayName: `${frame.name}: ${text}` },
    }] };
  });
  return (
    <TimeSeries
      frames={named} timeRange={range} timeZone="utc" width={width} height={height}
      legend={{ ...model.options.legend, calcs: [] }}
    >
      {(builder) => <Loads builder={builder} />}
    </TimeSeries>
  );
}

function Board() {
  const cell = PREVIEW.width / 24;
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div className="head">
        <span className="title">{PREVIEW.title}</span>
        {PREVIEW.variables.map((text) => <span className="variable" key={text}>{text}</span>)}
        <span className="range">
          {[PREVIEW.from, PREVIEW.to].map((at) => new Date(at).toISOString().slice(11, 19)).join(' – ')} UTC
          <span className="load"> ▂ load runs</span>
        </span>
      </div>
      {PREVIEW.panels.map(({ model, series }) => {
        const { x, y, w, h } = model.gridPos;
        const width = Math.floor(w * cell - GAP), height = h * (CELL + GAP) - GAP;
        return (
          <div key={model.id} style={{
            position: 'absolute', left: x * cell + GAP / 2, top: HEAD + y * (CELL + GAP), width, height,
          }}>
            <PanelContextProvider value={{ eventsScope: 'preview', eventBus: events }}>
              <PanelChrome title={model.title} description={model.description} width={width} height={height}>
                {(innerWidth, innerHeight) => (
                  <Body model={model} series={series} width={innerWidth} height={innerHeight} />
                )}
              </PanelChrome>
            </PanelContextProvider>
          </div>
        );
      })}
    </ThemeContext.Provider>
  );
}

createRoot(document.getElementById('root')!).render(<Board />);
