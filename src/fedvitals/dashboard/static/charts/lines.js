// SPDX-License-Identifier: Apache-2.0
// Courses over the rounds: the cohort as nested bands with its median, single nodes as lines on top, findings as flags.

import { readable, seriesColour, theme } from "../colour.js";
import { exact, number, withUnit } from "../format.js";
import { createFrame } from "./frame.js";
import { legend, paintEndLabels, roomFor } from "./labels.js";
import { flagRows, joinAxis, onAxis, paintBrush, paintCrosshair, paintFlags, paintRounds, roundBox } from "./rounds.js";
import { extent, linear, log } from "./scales.js";
import { between, firstAt, indexAt, stride, track } from "./tracks.js";

const CANVAS_FROM = 4000; // points from which an SVG would be slow
const FAR = 3; // how many spans the extremes of a cohort may stretch the axis

/** Options: {title, unit, axis, height, scale, onRound, digits}; data: {series, bands, flags, threshold, note, xs}. */
export function lineChart(host, options = {}) {
  const joined = joinAxis(options.axis);
  const { axis } = joined;
  const state = { series: [], bands: [], flags: [], labels: null, threshold: null, count: 0, beyond: null, shown: null, chosen: 0 };
  const hooks = onAxis(axis, () => frame, {
    pick: (round) => options.onRound?.(round),
    up: (step) => {
      const count = state.series.length || 1;
      state.chosen = (state.chosen + step + count) % count;
    },
    told: () => spoken(state, axis, options.unit),
  });
  const chart = {
    ...hooks,
    height: () => options.height ?? 160,
    layout: (width, height) => roundBox(width, height, axis),
    heavy: () => state.count > CANVAS_FROM,
    blank: () => (state.series.length || state.bands.length ? null : "Nothing was recorded for this yet."),
    paint: (pen, box) => paint(pen, box, state, options, axis, frame),
    paintHover: (pen, box) => paintHover(pen, box, state, options, axis, hooks),
    readout: () => readout(state, axis, options),
    tip: () => tip(state, axis, options),
    summary: () => summary(state, axis, options),
    csv: () => csv(state),
    spot: () => spotOf(frame, axis),
  };
  const frame = createFrame(host, "lines", { ...options, axis }, chart);
  joined.follow(frame);
  return {
    frame,
    update(data = {}) {
      take(state, data);
      frame.setNote(data.note ?? "");
      state.note = data.note ?? "";
      const [low, high] = extent(...[...state.series, ...state.bands].map((one) => [one.rounds[0], one.rounds.at(-1)]));
      if (joined.own && state.labels) axis.extend(0, state.labels.length - 1);
      else if (low <= high) axis.extend(low, high);
      frame.redraw();
    },
    destroy: () => frame.destroy(),
  };
}

const list = (values) => (Array.isArray(values) || ArrayBuffer.isView(values) ? values : []);

function take(state, data) {
  const full = (one, names) => ({ ...one, rounds: list(one.rounds), ...Object.fromEntries(names.map((name) => [name, list(one[name])])) });
  state.series = list(data.series).map((one, at) => ({
    ...full(one, ["values"]), low: one.low ?? null, high: one.high ?? null, index: at, reach: one.low ? stride(list(one.rounds)) : 1,
  }));
  state.bands = list(data.bands).map((one) => ({ ...full(one, ["min", "p5", "median", "p95", "max"]), reach: stride(list(one.rounds)) }));
  state.flags = list(data.flags);
  state.threshold = data.threshold ?? null;
  state.labels = data.xs && data.xs !== "round" ? list(data.xs.labels) : null;
  const counts = [...state.series, ...state.bands].map((one) => one.rounds.length * (one.p5 ? 5 : 1));
  state.count = counts.reduce((sum, one) => sum + one, 0);
}

function colourOf(series, colours) {
  return series.colour ?? (series.faint ? colours.ink2 : seriesColour(series.index, colours));
}

/** Of each list, what lies within the view. */
function within(one, name, low, high) {
  const values = one[name];
  if (!values?.length) return [];
  const [from, to] = [firstAt(one.rounds, low), firstAt(one.rounds, high + 1e-9)];
  return values.slice(from, one.rounds[to] === high ? to + 1 : to);
}

/** The ends of the value axis: all lines and the bulk of the cohort; its extremes as far as they let the rest be seen. */
function domain(state, { low, high }, scale) {
  const pick = (one, ...names) => names.map((name) => within(one, name, low, high));
  const positive = scale === "linear" ? (lists) => lists : (lists) => lists.map((values) => Array.from(values, (value) => (value > 0 ? value : null)));
  const inner = positive([...state.series.flatMap((one) => pick(one, "values", "low", "high")), ...state.bands.flatMap((one) => pick(one, "p5", "median", "p95")), state.threshold ? [state.threshold.value] : []]);
  let [from, to] = extent(...inner);
  const [least, most] = extent(...positive(state.bands.flatMap((one) => pick(one, "min", "max"))));
  if (!(from <= to)) [from, to] = [least, most];
  if (!(from <= to)) return { from: scale === "linear" ? 0 : 0.1, to: 1, beyond: null };
  if (scale !== "linear") return { from: Math.min(from, least), to: Math.max(to, most), beyond: null };
  const span = (to - from || Math.abs(to) || 1) * FAR;
  const beyond = most > to + span ? most : least < from - span ? least : null;
  return { from: Math.max(Math.min(from, least), from - span), to: Math.min(Math.max(to, most), to + span), beyond };
}

function scaleOf(state, box, options) {
  const kind = options.scale ?? "linear";
  const { from, to, beyond } = domain(state, box, kind);
  state.beyond = beyond;
  const count = Math.max(2, (box.y1 - box.y0) / 34);
  if (kind === "linear") {
    const room = (to - from) * 0.06 || 0;
    // Zero is a floor that people know: a value that cannot be negative does not get an axis that is.
    const floor = from >= 0 && from - room < 0 ? 0 : from - room;
    return linear(floor, to + room, box.y1, box.y0, count);
  }
  return log(from / 1.15, to * 1.15, box.y1, box.y0, { zero: kind === "log0", count });
}

function paintValues(pen, box, scale, options) {
  const colours = theme();
  for (const tick of scale.ticks) {
    const y = scale.of(tick);
    pen.line(box.x0, y, box.x1, y, { stroke: colours.line, opacity: 0.7 });
    const said = options.unit === "bytes" || options.unit === "seconds" ? withUnit(tick, options.unit) : number(tick);
    pen.text(box.x0 - 8, y + 4, said, { fill: colours.ink2, anchor: "end", room: box.x0 - 10 });
  }
  if (scale.zero !== null && scale.zero !== undefined) {
    pen.line(box.x0, scale.floor, box.x1, scale.floor, { stroke: colours.line, dash: [2, 3] });
    pen.text(box.x0 - 8, scale.zero + 4, "0", { fill: colours.ink2, anchor: "end" });
  }
}

function paint(pen, box, state, options, axis, frame) {
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
  const course = track(series.rounds, series.values, drawn);
  const dash = series.dash === true ? [4, 3] : series.dash || undefined;
  pen.path(course.lines, { stroke: colour, width: series.faint ? 1 : 1.75, dash, opacity });
  for (const [x, y] of course.dots) pen.disc(x, y, series.faint ? 1.5 : 2.25, { fill: colour, opacity });
  for (const { at, kind } of course.odd) paintOdd(pen, box, box.x(series.rounds[at]), kind, colour, colours);
  return course;
}

/** NaN: a struck ring on the floor; infinities: a triangle at the end that they left through. */
function paintOdd(pen, box, x, kind, colour, colours) {
  if (kind === "nan") {
    const y = box.y1 - 6;
    pen.disc(x, y, 3.5, { fill: colours.paper, stroke: colours.ink, width: 1.25 });
    pen.line(x - 2.5, y + 2.5, x + 2.5, y - 2.5, { stroke: colours.ink, width: 1.25 });
    return;
  }
  const up = kind === "up";
  const y = up ? box.y0 + 1 : box.y1 - 5;
  pen.path([[x, up ? y - 4 : y + 4, x + 4, up ? y + 3 : y - 3, x - 4, up ? y + 3 : y - 3]], { fill: colour }, true);
}

/** The last value that is there, within the view. */
function lastOf(rounds, values, high) {
  for (let at = Math.min(rounds.length - 1, firstAt(rounds, high)); at >= 0; at -= 1) {
    if (rounds[at] <= high && typeof values[at] === "number" && Number.isFinite(values[at])) return { round: rounds[at], value: values[at] };
  }
  return null;
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
  const found = [...lines.map((one) => ({ name: one.name, colour: colourOf(one, colours), href: one.href })), ...state.bands.map((one) => ({ name: one.name, colour: one.colour ?? colours.ink2 }))];
  return found.length > 1 || state.bands.length ? found.slice(0, 12) : [];
}

function notes(state, { shown, of }, options) {
  const said = [state.note];
  const factor = shown ? Math.round(of / shown) : 1;
  if (factor > 1) said.push(`1 of ${factor} points shown, extremes kept`);
  if (state.beyond !== null) said.push(`extremes up to ${withUnit(state.beyond, options.unit)} lie beyond the axis`);
  return said.filter(Boolean).join(" · ");
}

function valueAt(one, values, round) {
  const at = indexAt(one.rounds, round, one.reach);
  return at < 0 ? undefined : values[at];
}

function paintHover(pen, box, state, options, axis, hooks) {
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

const roundName = (state, axis, round) => (state.labels ? (state.labels[round] ?? "") : `${axis.label} ${number(round)}`);

function readout(state, axis, options) {
  if (axis.hover === null) return "";
  const first = state.series.find((one) => !one.faint) ?? state.series[0];
  const value = first ? valueAt(first, first.values, axis.hover) : undefined;
  const middle = state.bands[0] ? valueAt(state.bands[0], state.bands[0].median, axis.hover) : undefined;
  const shown = value !== undefined ? value : middle;
  const where = state.labels ? `${state.labels[axis.hover] ?? ""} ` : "";
  return shown === undefined ? `${where}–` : `${where}${withUnit(shown, options.unit)}`;
}

function tip(state, axis, options) {
  const round = axis.hover;
  if (round === null) return null;
  const colours = theme();
  const rows = [];
  for (const one of state.series) {
    const value = valueAt(one, one.values, round);
    if (value === undefined && state.series.length > 6) continue;
    const [low, high] = one.low ? [valueAt(one, one.low, round), valueAt(one, one.high, round)] : [];
    const spread = low !== undefined && low !== high ? `  (${number(low)} to ${number(high)})` : "";
    rows.push({ colour: colourOf(one, colours), name: one.name, value: exactly(value, options) + spread });
  }
  for (const one of state.bands) {
    const [min, p5, median, p95, max] = ["min", "p5", "median", "p95", "max"].map((name) => valueAt(one, one[name], round));
    rows.push({ colour: one.colour ?? colours.ink2, name: `${one.name} median`, value: exactly(median, options) });
    if (p5 !== undefined && p5 !== null) rows.push({ name: "5 % to 95 %", value: `${number(p5)} to ${number(p95)}` });
    if (min !== undefined && min !== null) rows.push({ name: "smallest, largest", value: `${number(min)}, ${number(max)}` });
  }
  return { head: roundName(state, axis, round), rows: [...rows, ...flagRows(state.flags, round)] };
}

function exactly(value, options) {
  if (value === undefined || value === null) return "–";
  return options.digits ? number(value, options.digits) : withPlain(value, options.unit);
}

/** Every digit; with the readable form beside it where a unit changes the figure. */
function withPlain(value, unit) {
  return unit === "bytes" || unit === "seconds" || unit === "bytes/s" ? withUnit(value, unit) : exact(Number(value.toPrecision(9)));
}

function spoken(state, axis, unit) {
  if (axis.hover === null) return `${axis.label}s ${axis.view[0]} to ${axis.view[1]}`;
  const one = state.series[state.chosen] ?? null;
  const value = one ? valueAt(one, one.values, axis.hover) : valueAt(state.bands[0] ?? { rounds: [] }, state.bands[0]?.median ?? [], axis.hover);
  const flags = flagRows(state.flags, axis.hover).map((row) => row.name);
  return [roundName(state, axis, axis.hover), one?.name, value === undefined ? "no value" : withUnit(value, unit), ...flags].filter(Boolean).join(", ");
}

function summary(state, axis, options) {
  const first = state.series.find((one) => !one.faint) ?? state.bands[0];
  const last = first ? lastOf(first.rounds, first.values?.length ? first.values : (first.median ?? []), axis.view[1]) : null;
  const parts = [`${options.title ?? "Chart"}, ${axis.label}s ${axis.view[0]} to ${axis.view[1]}`];
  if (last) parts.push(`last value ${withUnit(last.value, options.unit)} of ${first.name} at ${roundName(state, axis, last.round)}`);
  parts.push(state.flags.length ? `${state.flags.length} findings marked` : "no finding marked");
  return parts.join("; ");
}

function spotOf(frame, axis) {
  const { box } = frame;
  return axis.hover === null ? null : { x: box.x(axis.hover), y: box.y0 + 12 };
}

function csv(state) {
  const rows = [["series", state.labels ? "label" : "round", "value", "low", "high"]];
  const at = (round) => (state.labels ? (state.labels[round] ?? round) : round);
  for (const one of state.series) {
    for (let i = 0; i < one.rounds.length; i += 1) rows.push([one.name, at(one.rounds[i]), one.values[i], one.low?.[i], one.high?.[i]]);
  }
  for (const one of state.bands) {
    for (const name of ["min", "p5", "median", "p95", "max"]) {
      for (let i = 0; i < one.rounds.length; i += 1) rows.push([`${one.name} ${name}`, at(one.rounds[i]), one[name][i], null, null]);
    }
  }
  return rows;
}
