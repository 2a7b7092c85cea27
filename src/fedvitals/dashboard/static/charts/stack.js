// SPDX-License-Identifier: Apache-2.0
// Where a quantity goes, round by round: one bar per round, stacked by part in the given order.

import { partColour, theme } from "../colour.js";
import { brief, number, withUnit } from "../format.js";
import { createFrame } from "./frame.js";
import { legend, paintEndLabels, roomFor, widest } from "./labels.js";
import { flagRows, joinAxis, onAxis, paintBrush, paintCrosshair, paintFlags, paintRounds, roundBox } from "./rounds.js";
import { linear } from "./scales.js";
import { firstAt, indexAt } from "./tracks.js";

const TALL = 4; // times the usual round: longer ones are cut off, with a note

/** Options: {title, unit, axis, height, onRound}; data: {rounds, parts: [{name, values}], flags, note}. */
export function stackChart(host, options = {}) {
  const joined = joinAxis(options.axis);
  const { axis } = joined;
  const state = { rounds: [], parts: [], totals: [], flags: [], note: "" };
  const hooks = onAxis(axis, () => frame, {
    pick: (round) => options.onRound?.(round),
    told: () => spoken(state, axis, options),
  });
  const chart = {
    ...hooks,
    height: () => options.height ?? 140,
    layout: (width, height) => roundBox(width, height, axis),
    heavy: () => state.rounds.length * state.parts.length > 4000,
    blank: () => (state.rounds.length && state.parts.length ? null : "Nothing was recorded for this yet."),
    paint: (pen, box) => paint(pen, box, state, options, axis, frame),
    paintHover(pen, box) {
      paintBrush(pen, box, hooks.brush);
      paintCrosshair(pen, box, axis);
    },
    readout: () => readout(state, axis, options),
    tip: () => tip(state, axis, options),
    summary: () => summary(state, axis, options),
    csv: () => csv(state),
    spot: () => (axis.hover === null ? null : { x: frame.box.x(axis.hover), y: 16 }),
  };
  const frame = createFrame(host, "stack", { ...options, axis }, chart);
  joined.follow(frame);
  return {
    frame,
    update({ rounds = [], parts = [], flags = [], note = "" } = {}) {
      const totals = rounds.map((_, at) => parts.reduce((sum, part) => sum + positive(part.values[at]), 0));
      Object.assign(state, { rounds, parts, flags, totals, note });
      frame.setNote(note);
      axis.roomForEnds(widest(parts.map((part) => part.name)));
      if (rounds.length) axis.extend(rounds[0], rounds.at(-1));
      frame.fed();
    },
    destroy: () => frame.destroy(),
  };
}

/** Stacks have no negative and no missing parts: both take no room. */
const positive = (value) => (typeof value === "number" && Number.isFinite(value) && value > 0 ? value : 0);

/** The indices to draw: one bar per pixel, that of the largest round if several share it. */
function chosen(state, box) {
  const [from, to] = [firstAt(state.rounds, box.low), firstAt(state.rounds, box.high + 1)];
  if (box.step >= 1) return Array.from({ length: to - from }, (_, at) => from + at);
  const best = new Map();
  for (let at = from; at < to; at += 1) {
    const pixel = Math.floor(box.x(state.rounds[at]));
    const before = best.get(pixel);
    if (before === undefined || state.totals[at] > state.totals[before]) best.set(pixel, at);
  }
  return [...best.values()];
}

function paint(pen, box, state, options, axis, frame) {
  const colours = theme();
  const shown = chosen(state, box);
  const cut = tall(state, shown);
  const most = shown.reduce((high, at) => (cut.has(at) ? high : Math.max(high, state.totals[at])), 0);
  const top = most * 1.06 || 1;
  const scale = linear(0, top, box.y1, box.y0, Math.max(2, (box.y1 - box.y0) / 34));
  for (const tick of scale.ticks) {
    const y = scale.of(tick);
    if (tick) pen.line(box.x0, y, box.x1, y, { stroke: colours.line, opacity: 0.7 });
    pen.text(box.x0 - 8, y + 4, tick ? brief(tick, options.unit) : "0", { fill: colours.ink2, anchor: "end", room: box.x0 - 10 });
  }
  const gap = box.step >= 4 ? 1 : 0;
  const width = Math.max(1, box.step - gap);
  pen.clip(box.x0, box.y0 - 2, box.x1 - box.x0, box.y1 - box.y0 + 2, (inner) => {
    const fits = (at) => (cut.has(at) ? top / state.totals[at] : 1); // what is cut off keeps its proportions
    paintBars(inner, box, state, shown, width, scale, fits, colours);
    for (const at of cut) paintCut(inner, box, box.x(state.rounds[at]), width, withUnit(state.totals[at], options.unit), colours);
  });
  paintRounds(pen, box, axis, box.y1);
  paintFlags(pen, box, state.flags, box.y1);
  paintNames(pen, box, state, scale, shown, frame, colours);
  if (box.live) {
    const factor = shown.length ? Math.round((box.high - box.low + 1) / shown.length) : 1;
    const thin = box.step < 1 && factor > 1 ? `1 of ${factor} rounds shown, the longest` : "";
    const over = cut.size ? `${axis.label}${cut.size > 1 ? "s" : ""} ${[...cut].map((at) => state.rounds[at]).join(", ")} cut off` : "";
    frame.setNote([state.note, thin, over].filter(Boolean).join(" · "));
  }
}

/** The few rounds that are so long that all others would be flat: a warm-up, a stall. */
function tall(state, shown) {
  const sizes = shown.map((at) => state.totals[at]).filter((size) => size > 0).sort((a, b) => a - b);
  const found = shown.filter((at) => state.totals[at] > TALL * sizes[sizes.length >> 1]);
  return new Set(found.length <= Math.max(1, shown.length / 10) && shown.length > 2 ? found : []);
}

/** Two strokes across a bar that continues beyond the axis, and how far. */
function paintCut(pen, box, x, width, text, colours) {
  const [y, half] = [box.y0 + 14, width / 2 + 1];
  for (const lower of [0, 5]) pen.line(x - half, y + lower + 3, x + half, y + lower - 3, { stroke: colours.paper, width: 2 });
  pen.text(Math.min(x, box.x1 - 24), y + 22, text, { fill: colours.ink, anchor: "middle", halo: colours.paper });
}

/** Part by part, from the bottom up: all bars of a part are one stroke. */
function paintBars(pen, box, state, shown, width, scale, fits, colours) {
  const below = new Float64Array(shown.length);
  for (const part of state.parts) {
    const flat = [];
    shown.forEach((at, place) => {
      const value = positive(part.values[at]) * fits(at);
      if (!value) return;
      const [y0, y1] = [scale.of(below[place]), scale.of(below[place] + value)];
      flat.push(box.x(state.rounds[at]) - width / 2, y1, width, Math.max(0.5, y0 - y1));
      below[place] += value;
    });
    pen.rects(flat, { fill: part.colour ?? partColour(part.name, colours) });
  }
}

/** Names beside the parts of the last bar; a legend if there is no room. */
function paintNames(pen, box, state, scale, shown, frame, colours) {
  const entries = state.parts.map((part) => ({ name: part.name, colour: part.colour ?? partColour(part.name, colours) }));
  const last = shown.at(-1);
  const fits = roomFor(entries.length, box) && last !== undefined;
  if (box.live) legend(frame.dom.extra, fits ? [] : entries);
  if (!fits) return;
  let sum = 0;
  const labels = state.parts.map((part, at) => {
    const value = positive(part.values[last]);
    sum += value;
    return { ...entries[at], y: scale.of(sum - value / 2), faint: false };
  });
  paintEndLabels(pen, box, labels);
}

function at(state, axis) {
  return axis.hover === null ? -1 : indexAt(state.rounds, axis.hover);
}

function readout(state, axis, options) {
  const index = at(state, axis);
  if (index < 0) return "";
  const most = largestPart(state, index);
  const part = most ? ` · most of it ${most.name} ${withUnit(most.values[index], options.unit)}` : "";
  return `all ${withUnit(state.totals[index], options.unit)}${part}`;
}

function largestPart(state, index) {
  return state.parts.reduce((best, part) => (positive(part.values[index]) > positive(best?.values[index]) ? part : best), null);
}

function tip(state, axis, options) {
  const index = at(state, axis);
  if (index < 0) return null;
  const total = state.totals[index];
  const parts = state.parts.map((part) => ({ colour: part.colour ?? partColour(part.name), name: part.name, size: part.values[index] }));
  const rows = parts.filter((part) => part.size).reverse().map((part) => ({
    ...part, value: `${withUnit(part.size, options.unit)}${total ? `  ${Math.round((100 * positive(part.size)) / total)} %` : ""}`,
  }));
  const head = `${axis.label} ${number(axis.hover)} · ${withUnit(total, options.unit)}`;
  return { head, rows: [...rows, ...flagRows(state.flags, axis.hover)] };
}

function spoken(state, axis, options) {
  const index = at(state, axis);
  if (index < 0) return axis.hover === null ? `rounds ${axis.view[0]} to ${axis.view[1]}` : `round ${axis.hover}, no value`;
  const largest = largestPart(state, index);
  const most = largest ? `, most of it ${largest.name}` : "";
  return `round ${axis.hover}, ${withUnit(state.totals[index], options.unit)}${most}`;
}

function csv({ rounds, parts }) {
  const rows = rounds.map((round, at) => [round, ...parts.map((part) => part.values[at])]);
  return [["round", ...parts.map((part) => part.name)], ...rows];
}

function summary(state, axis, options) {
  const parts = state.parts.map((part) => part.name).join(", ");
  const what = `${options.title ?? "Stacked bars"}, rounds ${axis.view[0]} to ${axis.view[1]}; parts ${parts}`;
  return `${what}; last ${withUnit(state.totals.at(-1), options.unit)}; ${state.flags.length || "no"} findings marked`;
}
