// SPDX-License-Identifier: Apache-2.0
// Paints a line chart, and what follows the pointer over it.

import { readable, theme } from "../colour.js";
import { brief, withUnit } from "../format.js";
import { legend, paintEndLabels, roomFor } from "./labels.js";
import { colourOf, lastOf, scaleOf, valueAt } from "./lines_values.js";
import { paintBrush, paintCrosshair, paintFlags, paintRounds } from "./rounds.js";
import { between, track } from "./tracks.js";

function paintValues(pen, box, scale, options) {
  const colours = theme();
  for (const tick of scale.ticks) {
    const y = scale.of(tick);
    pen.line(box.x0, y, box.x1, y, { stroke: colours.line, opacity: 0.7 });
    pen.text(box.x0 - 8, y + 4, tick ? brief(tick, options.unit) : "0", { fill: colours.ink2, anchor: "end", room: box.x0 - 10 });
  }
  if (scale.zero !== null && scale.zero !== undefined) {
    pen.line(box.x0, scale.floor, box.x1, scale.floor, { stroke: colours.line, dash: [2, 3] });
    pen.text(box.x0 - 8, scale.zero + 4, "0", { fill: colours.ink2, anchor: "end" });
  }
}

export function paint(pen, box, state, options, axis, frame) {
  const colours = theme();
  const scale = scaleOf(state, box, options);
  state.scale = scale;
  paintValues(pen, box, scale, options);
  const drawn = { x: box.x, y: scale.of, low: box.low, high: box.high, step: box.step };
  const counted = { shown: 0, of: 0 };
  pen.clip(box.x0, box.y0 - 4, box.x1 - box.x0, box.y1 - box.y0 + 4, (inner) => {
    for (const band of state.bands) paintBand(inner, band, drawn, colours);
    paintThreshold(inner, box, state.threshold, scale, colours);
    for (const series of [...state.series].sort((a, b) => Boolean(b.faint) - Boolean(a.faint))) {
      const { shown, of } = paintSeries(inner, series, drawn, colours, box);
      counted.shown += shown;
      counted.of += of;
    }
  });
  paintRounds(pen, box, axis, box.y1, state.labels);
  paintFlags(pen, box, state.flags, box.y1, box.y0);
  const ends = endLabels(state, box, scale, colours);
  const fits = roomFor(ends.length, box);
  if (fits) paintEndLabels(pen, box, ends);
  if (box.live) {
    legend(frame.dom.extra, fits ? [] : named(state, colours));
    frame.setNote(notes(state, counted, options));
  }
}

function paintBand(pen, band, drawn, colours) {
  const base = band.colour ?? colours.ink2;
  const [outer, inside] = colours.dark ? [0.16, 0.24] : [0.12, 0.2];
  pen.path(between(band.rounds, band.min, band.max, drawn), { fill: base, opacity: outer }, true);
  pen.path(between(band.rounds, band.p5, band.p95, drawn), { fill: base, opacity: inside }, true);
  const middle = track(band.rounds, band.median, drawn);
  pen.path(middle.lines, { stroke: base, width: 1.5 });
  for (const [x, y] of middle.dots) pen.disc(x, y, 2, { fill: base });
}

function paintThreshold(pen, box, threshold, scale, colours) {
  if (!threshold || !Number.isFinite(scale.of(threshold.value))) return;
  const y = scale.of(threshold.value);
  pen.line(box.x0, y, box.x1, y, { stroke: colours.critical, dash: [5, 4] });
  if (threshold.label) pen.text(box.x0 + 6, y - 4, threshold.label, { fill: readable(colours.critical, colours), room: box.x1 - box.x0 - 12 });
}

function paintSeries(pen, series, drawn, colours, box) {
  const colour = colourOf(series, colours);
  const opacity = series.faint ? 0.55 : 1;
  if (series.low && series.high) {
    pen.path(between(series.rounds, series.low, series.high, drawn), { fill: colour, opacity: 0.22 }, true);
  }
  const line = track(series.rounds, series.values, drawn);
  const dash = series.dash === true ? [4, 3] : series.dash || undefined;
  pen.path(line.lines, { stroke: colour, width: series.faint ? 1 : 1.75, dash, opacity });
  for (const [x, y] of line.dots) pen.disc(x, y, series.faint ? 1.5 : 2.25, { fill: colour, opacity });
  for (const { at, kind } of line.odd) paintOdd(pen, box, box.x(series.rounds[at]), kind, colour, colours);
  return line;
}

/**
 * NaN: a struck ring at the top, since at the bottom it would be read as 0; infinities: a triangle at the end where
 * they left.
 */
function paintOdd(pen, box, x, kind, colour, colours) {
  if (kind === "nan") {
    const y = box.y0 + 5;
    pen.disc(x, y, 3.5, { fill: colours.paper, stroke: colours.ink, width: 1.25 });
    pen.line(x - 2.5, y + 2.5, x + 2.5, y - 2.5, { stroke: colours.ink, width: 1.25 });
    return;
  }
  const up = kind === "up";
  const y = up ? box.y0 + 1 : box.y1 - 5;
  pen.path([[x, up ? y - 4 : y + 4, x + 4, up ? y + 3 : y - 3, x - 4, up ? y + 3 : y - 3]], { fill: colour }, true);
}

/** The names at the ends of lines, if there is room. */
export function endNames(state) {
  const lines = state.series.filter((one) => !one.faint || state.series.length <= 8);
  return [...lines, ...state.bands].map((one) => one.name);
}

function endLabels(state, box, scale, colours) {
  const found = [];
  const put = (one, values, colour, faint) => {
    const last = lastOf(one.rounds, values, box.high);
    const y = last ? scale.of(last.value) : NaN;
    if (last && last.round >= box.low && Number.isFinite(y)) {
      found.push({ name: one.name, x: box.x(last.round), y: Math.max(box.y0, Math.min(box.y1, y)), colour, href: one.href, faint });
    }
  };
  for (const one of state.series) if (!one.faint || state.series.length <= 8) put(one, one.values, colourOf(one, colours), one.faint);
  for (const one of state.bands) put(one, one.median, one.colour ?? colours.ink2, true);
  return found;
}

function named(state, colours) {
  const lines = state.series.filter((one) => !one.faint || state.series.length <= 8);
  const found = lines.map((one) => ({ name: one.name, colour: colourOf(one, colours), href: one.href }));
  found.push(...state.bands.map((one) => ({ name: one.name, colour: one.colour ?? colours.ink2 })));
  return found.length > 1 || state.bands.length ? found.slice(0, 12) : [];
}

function notes(state, { shown, of }, options) {
  const said = [state.note];
  const factor = shown ? Math.round(of / shown) : 1;
  if (factor > 1) said.push(`1 of ${factor} points shown, extremes kept`);
  if (state.beyond !== null) said.push(`extremes up to ${withUnit(state.beyond, options.unit)} lie beyond the axis`);
  return said.filter(Boolean).join(" · ");
}

export function paintHover(pen, box, state, options, axis, hooks) {
  paintBrush(pen, box, hooks.brush);
  paintCrosshair(pen, box, axis, { labels: state.labels });
  const round = axis.hover;
  if (round === null || !state.scale || round < box.low || round > box.high) return;
  const colours = theme();
  const dot = (value, colour) => {
    const y = typeof value === "number" ? state.scale.of(value) : NaN;
    if (y >= box.y0 - 4 && y <= box.y1) pen.disc(box.x(round), y, 3, { fill: colour, stroke: colours.paper, width: 1.5 });
  };
  for (const one of state.bands) dot(valueAt(one, one.median, round), one.colour ?? colours.ink2);
  for (const one of state.series) if (!one.faint) dot(valueAt(one, one.values, round), colourOf(one, colours));
}
