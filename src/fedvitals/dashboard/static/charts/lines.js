// SPDX-License-Identifier: Apache-2.0
// Series over the rounds: the cohort as nested bands with its median, single nodes as lines on top, findings as flags.

import { createFrame } from "./frame.js";
import { widest } from "./labels.js";
import { endNames, paint, paintHover } from "./lines_paint.js";
import { csv, readout, spoken, summary, tip } from "./lines_words.js";
import { joinAxis, onAxis, roundBox } from "./rounds.js";
import { extent } from "./scales.js";
import { stride } from "./tracks.js";

const CANVAS_FROM = 4000; // points from which an SVG would be slow

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
    labelled: () => state.labels !== null,
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
      axis.roomForEnds(widest(endNames(state)));
      const [low, high] = extent(...[...state.series, ...state.bands].map((one) => [one.rounds[0], one.rounds.at(-1)]));
      if (joined.own && state.labels) axis.extend(0, state.labels.length - 1);
      else if (low <= high) axis.extend(low, high);
      frame.fed();
    },
    destroy: () => frame.destroy(),
  };
}

const list = (values) => (Array.isArray(values) || ArrayBuffer.isView(values) ? values : []);

function take(state, data) {
  const full = (one, names) => ({ ...one, rounds: list(one.rounds), ...Object.fromEntries(names.map((name) => [name, list(one[name])])) });
  state.series = list(data.series).map((one, at) => ({
    ...full(one, ["values"]), low: one.low ?? null, high: one.high ?? null, index: one.index ?? at, reach: one.low ? stride(list(one.rounds)) : 1,
  }));
  state.bands = list(data.bands).map((one) => ({ ...full(one, ["min", "p5", "median", "p95", "max"]), reach: stride(list(one.rounds)) }));
  state.flags = list(data.flags);
  state.threshold = data.threshold ?? null;
  state.labels = data.xs && data.xs !== "round" ? list(data.xs.labels) : null;
  const counts = [...state.series, ...state.bands].map((one) => one.rounds.length * (one.p5 ? 5 : 1));
  state.count = counts.reduce((sum, one) => sum + one, 0);
}

function spotOf(frame, axis) {
  const { box } = frame;
  return axis.hover === null ? null : { x: box.x(axis.hover), y: box.y0 + 12 };
}
