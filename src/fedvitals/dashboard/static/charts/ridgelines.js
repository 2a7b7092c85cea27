// SPDX-License-Identifier: Apache-2.0
// Distributions one behind the other, from the first (light) to the last (dark): how a shape changes over the rounds.

import { mix, theme } from "../colour.js";
import { number } from "../format.js";
import { createFrame } from "./frame.js";
import { textWidth } from "./pen.js";
import { picking } from "./picking.js";
import { extent, linear, niceTicks } from "./scales.js";

const ROW = 22;
const RISE = 2.4; // rows that the highest ridge extends over

/** Options: {title, unit}; data: {ridges: [{name, short, xs, heights}], xLabel, ticks: [{x, text}], note}. */
export function ridgelines(host, options = {}) {
  const state = { ridges: [], label: "", x: null, ticks: null };
  const hooks = picking(() => frame, {
    find: (x, y) => {
      state.x = x;
      const at = Math.floor((y - frame.box.y0) / ROW);
      return at >= 0 && at < state.ridges.length ? at : -1;
    },
    count: () => state.ridges.length,
    told: (at) => `${state.ridges[at].name}, ${peak(state.ridges[at], state)}`,
  });
  const chart = {
    ...hooks,
    height: () => state.ridges.length * ROW + RISE * ROW + 28,
    layout: (width, height) => ({ x0: width < 560 ? 52 : 84, x1: width - 16, y0: RISE * ROW, y1: height - 28 }),
    blank: () => (state.ridges.some((one) => one.xs?.length) ? null : "No distribution was recorded yet."),
    paint: (pen, box) => paint(pen, box, state),
    paintHover: (pen, box) => paintHover(pen, box, state, hooks.chosen),
    readout: () => (hooks.chosen < 0 ? "" : state.ridges[hooks.chosen].name),
    tip: () => (hooks.chosen < 0 ? null : tip(state, hooks.chosen, frame.box)),
    summary: () => summary(state, options),
    csv: () => [["name", "x", "height"], ...state.ridges.flatMap((one) => Array.from(one.xs, (x, at) => [one.name, x, one.heights[at]]))],
  };
  const frame = createFrame(host, "ridgelines", options, chart);
  return {
    frame,
    update({ ridges = [], xLabel = "", note = "", ticks = null } = {}) {
      Object.assign(state, { ridges, label: xLabel, ticks });
      hooks.chosen = -1;
      frame.setNote(note);
      frame.fed();
    },
    destroy: () => frame.destroy(),
  };
}

function summary(state, options) {
  const [first, last] = [state.ridges[0], state.ridges.at(-1)];
  const what = `${options.title ?? "Ridgelines"}, ${number(state.ridges.length)} distributions`;
  return `${what} from ${first.name} to ${last.name}; the last: ${peak(last, state)}`;
}

function peak(ridge, state) {
  let best = 0;
  for (let at = 1; at < ridge.heights.length; at += 1) if (ridge.heights[at] > ridge.heights[best]) best = at;
  return ridge.xs.length ? `highest at ${nameOf(state, ridge.xs[best])}` : "empty";
}

function scales(state, box) {
  const [low, high] = extent(...state.ridges.map((one) => one.xs));
  const [, most] = extent(...state.ridges.map((one) => one.heights));
  const x = linear(low, high, box.x0, box.x1);
  return { x, rise: (height) => (height / (most > 0 ? most : 1)) * RISE * ROW };
}

/** The labelled positions of the x axis: the caller's own, as many as fit, else round numbers. */
function ticksOf(state, x, count) {
  if (!state.ticks) return niceTicks(x.low, x.high, count).map((tick) => ({ x: tick, text: number(tick) }));
  const every = Math.max(1, Math.ceil(state.ticks.length / Math.max(2, count)));
  const last = state.ticks.length - 1;
  // The end is always labelled; a label that would overlap it is omitted.
  return state.ticks.filter((_, at) => at === last || (at % every === 0 && last - at >= Math.max(1, every * 0.8)));
}

const nameOf = (state, x) => state.ticks?.find((one) => one.x === x)?.text ?? number(x);

const shortName = ({ name, short }, room) => (short && textWidth(name) > room ? short : name);

const baseOf = (box, at) => box.y0 + (at + 1) * ROW - 4;

function outline(ridge, base, { x, rise }) {
  const points = [];
  for (let at = 0; at < ridge.xs.length; at += 1) {
    const height = ridge.heights[at];
    if (Number.isFinite(height ?? NaN) && Number.isFinite(ridge.xs[at] ?? NaN)) points.push(x.of(ridge.xs[at]), base - rise(Math.max(0, height)));
  }
  return points;
}

function paint(pen, box, state) {
  const colours = theme();
  const drawn = scales(state, box);
  for (const { x: tick, text } of ticksOf(state, drawn.x, (box.x1 - box.x0) / 90)) {
    const px = drawn.x.of(tick);
    pen.line(px, box.y0, px, box.y1, { stroke: colours.line, opacity: 0.7 });
    pen.text(px, box.y1 + 14, text, { fill: colours.ink2, anchor: "middle" });
  }
  const every = Math.max(1, Math.ceil(13 / ROW));
  state.ridges.forEach((ridge, at) => {
    const base = baseOf(box, at);
    const points = outline(ridge, base, drawn);
    const share = state.ridges.length > 1 ? at / (state.ridges.length - 1) : 1;
    const colour = mix(mix(colours.paper, colours.accent, 0.45), mix(colours.accent, colours.ink, 0.25), share);
    if (points.length >= 4) {
      pen.path([[points[0], base, ...points, points.at(-2), base]], { fill: mix(colours.paper, colour, 0.22), opacity: 0.92 }, true);
      pen.path([points], { stroke: colour, width: 1.25 });
    }
    pen.line(box.x0, base, box.x1, base, { stroke: colours.line });
    if (at % every === 0) pen.text(box.x0 - 8, base + 1, shortName(ridge, box.x0 - 12), { fill: colours.ink2, anchor: "end", room: box.x0 - 12 });
  });
  if (state.label) pen.text(box.x1, box.y1 + 26, state.label, { fill: colours.ink2, anchor: "end", room: box.x1 - box.x0 });
}

function paintHover(pen, box, state, chosen) {
  if (chosen < 0) return;
  const colours = theme();
  const points = outline(state.ridges[chosen], baseOf(box, chosen), scales(state, box));
  if (points.length >= 4) pen.path([points], { stroke: colours.ink, width: 2 });
  const at = under(state, chosen, box);
  if (at) pen.line(at.px, box.y0, at.px, box.y1, { stroke: colours.ink2, opacity: 0.6 });
}

function under(state, chosen, box) {
  const ridge = state.ridges[chosen];
  if (!ridge?.xs.length || state.x === null) return null;
  const { x } = scales(state, box);
  let best = 0;
  for (let at = 1; at < ridge.xs.length; at += 1) if (Math.abs(x.of(ridge.xs[at]) - state.x) < Math.abs(x.of(ridge.xs[best]) - state.x)) best = at;
  return { x: ridge.xs[best], height: ridge.heights[best], px: x.of(ridge.xs[best]) };
}

function tip(state, chosen, box) {
  const at = under(state, chosen, box);
  const rows = at ? [{ name: state.label || "x", value: nameOf(state, at.x) }, { name: "height", value: number(at.height) }] : [];
  return { head: state.ridges[chosen].name, rows, foot: peak(state.ridges[chosen], state) };
}
