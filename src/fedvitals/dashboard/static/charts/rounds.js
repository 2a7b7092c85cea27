// SPDX-License-Identifier: Apache-2.0
// What charts on the shared axis have in common: positions of rounds, ticks, flags, crosshair, brush and keys.

import { severityColour, severityFill, severityRank, SHAPES, theme } from "../colour.js";
import { exact, number, seconds } from "../format.js";
import { Axis } from "./axis.js";
import { fitted, shape, textWidth } from "./pen.js";
import { niceTicks, roundTicks } from "./scales.js";

const FOOT = 24; // pixels for the numbers of the axis
const NARROW = 560;

/** Gutters are the same in all charts of a page, so that the rounds line up. */
export function gutters(width, axis) {
  const narrow = width < NARROW;
  const names = Math.ceil(axis.names) + 14;
  const left = narrow ? Math.max(52, Math.min(104, names)) : (axis.left ?? Math.max(84, Math.min(176, width * 0.2, names)));
  const right = axis.right ?? Math.max(92, Math.min(260, width * 0.22, Math.ceil(axis.ends) + 14));
  return { left, right: narrow ? 12 : right, narrow };
}

/** Positions: x(round) is the middle of its column, at(x) the round under a pixel. */
export function roundBox(width, height, axis, { top = 10, bottom = FOOT } = {}) {
  const { left, right, narrow } = gutters(width, axis);
  const [x0, x1] = [left, Math.max(left + 20, width - right)];
  const [low, high] = axis.view;
  const cell = axis.continuous ? 0 : 1;
  const step = (x1 - x0) / Math.max(high - low + cell, 1e-12);
  const x = (round) => x0 + (round - low + cell / 2) * step;
  const at = (px) => {
    const value = low + (px - x0) / step;
    return Math.max(low, Math.min(high, axis.continuous ? value : Math.floor(value)));
  };
  return { x0, x1, y0: top, y1: height - bottom, step, x, at, narrow, low, high };
}

function tickText(axis, value, labels) {
  if (labels) return labels[value] ?? "";
  return axis.continuous ? inOneUnit(value, axis.view[1]) : number(value);
}

/** Seconds in the unit of the longest, so that the numbers of an axis are comparable. */
function inOneUnit(value, most) {
  if (!value) return "0";
  if (most >= 120) return seconds(value);
  const [factor, unit] = most >= 1 ? [1, "s"] : most >= 1e-3 ? [1e3, "ms"] : [1e6, "µs"];
  return `${number(value * factor)}\u202f${unit}`;
}

/** The axis of rounds with its numbers, at the height y. */
export function paintRounds(pen, box, axis, y, whole) {
  const colours = theme();
  const labels = whole ? distinct(whole) : null;
  pen.line(box.x0, y, box.x1, y, { stroke: colours.line });
  const room = labels ? 64 : 56;
  const ticks = axis.continuous ? niceTicks(box.low, box.high, (box.x1 - box.x0) / 90) : roundTicks([box.low, box.high], box.step, room);
  for (const tick of ticks) {
    const x = box.x(tick);
    pen.line(x, y, x, y + 4, { stroke: colours.line });
    const most = labels ? Math.max(room, box.step) - 6 : undefined;
    pen.text(x, y + 15, tickText(axis, tick, labels), { fill: colours.ink2, anchor: "middle", room: most });
  }
  if (!labels && !box.narrow && !axis.continuous) pen.text(box.x0 - 8, y + 15, axis.label, { fill: colours.ink2, anchor: "end" });
}

/** Names without their common beginning and end: of «features.3.conv.weight» the 3. */
export function distinct(names) {
  if (names.length < 2) return names;
  const parts = names.map((name) => String(name).split(/(?<=[./_])|(?=[./_])/));
  const least = Math.min(...parts.map((one) => one.length)) - 1;
  const same = (at) => parts.every((one) => one.at(at) === parts[0].at(at));
  let [head, tail] = [0, 0];
  while (head < least && same(head)) head += 1;
  while (tail < least - head && same(-1 - tail)) tail += 1;
  return parts.map((one) => one.slice(head, one.length - tail).join("").replace(/^[./_]|[./_]$/g, ""));
}

/** Findings on the axis: a shape where each began, a bar as long as it lasted. */
export function paintFlags(pen, box, flags, y, rise) {
  const inView = flags.filter((flag) => flag.round <= box.high && (flag.until ?? flag.round) >= box.low);
  const sorted = inView.sort((a, b) => severityRank(a.severity) - severityRank(b.severity));
  for (const flag of sorted) {
    const colour = severityColour(flag.severity);
    const from = Math.max(box.x0, box.x(flag.round));
    const until = flag.until === null || flag.until === undefined ? from : Math.min(box.x1, box.x(flag.until));
    if (until > from) pen.line(from, y, until, y, { stroke: colour, width: 2, opacity: 0.55 });
    if (flag.round < box.low) continue;
    if (rise !== undefined) pen.line(from, rise, from, y, { stroke: colour, dash: [1, 3], opacity: 0.8 });
    pen.link(flag.href, (inner) => {
      shape(inner, flag.severity, from, y, 13, { fill: theme().paper });
      shape(inner, flag.severity, from, y, 9, { fill: severityFill(flag.severity), stroke: colour });
    });
  }
}

/** The hairline at the round under the pointer, with its number on the axis. */
export function paintCrosshair(pen, box, axis, { top = box.y0, bottom = box.y1, number: withNumber = true, labels } = {}) {
  const round = axis.hover;
  if (round === null || round < box.low || round > box.high) return;
  const colours = theme();
  const x = box.x(round);
  pen.line(x, top, x, bottom, { stroke: colours.ink2, opacity: 0.7 });
  if (!withNumber) return;
  const text = fitted(tickText(axis, axis.continuous ? Number(round.toPrecision(4)) : round, labels), 220);
  const wide = Math.max(24, textWidth(text) + 10);
  const centre = Math.max(wide / 2, Math.min(box.width - wide / 2, x));
  pen.rect(centre - wide / 2, bottom + 3, wide, 17, { fill: colours.ink });
  pen.text(centre, bottom + 15, text, { fill: colours.paper, anchor: "middle" });
}

export function paintBrush(pen, box, brush, top = box.y0, bottom = box.y1) {
  if (!brush) return;
  const colours = theme();
  const [from, to] = brush;
  const half = box.step / 2;
  const [x0, x1] = [Math.max(box.x0, box.x(from) - half), Math.min(box.x1, box.x(to) + half)];
  pen.rect(x0, top, x1 - x0, bottom - top, { fill: colours.accent, opacity: 0.14 });
  pen.line(x0, top, x0, bottom, { stroke: colours.accent });
  pen.line(x1, top, x1, bottom, { stroke: colours.accent });
}

/** The flags at a round, as rows of a tooltip. */
export function flagRows(flags, round, limit = 4) {
  const here = flags.filter((flag) => flag.round <= round && round <= (flag.until ?? flag.round));
  const worst = here.sort((a, b) => severityRank(b.severity) - severityRank(a.severity)).slice(0, limit);
  return worst.map((flag) => ({
    shape: SHAPES[flag.severity] ?? "·", colour: severityColour(flag.severity), name: flag.label ?? flag.severity,
    value: flag.round === round ? "begins" : `since ${exact(flag.round)}`,
  }));
}

/**
 * The pointer and key hooks of a chart on an axis. `pick(round, x, y)`: a click or Enter; `up(step)`: ↑ and ↓, for
 * charts with rows or several lines; `told()`: the text to announce after a key.
 */
export function onAxis(axis, frameOf, { pick, up, told, reach }) {
  const hooks = {
    brush: null,
    move(x, y) {
      const { box } = frameOf();
      const inside = x >= box.x0 - 6 && x <= box.x1 + 6;
      axis.setHover(inside ? box.at(x) : null);
      reach?.(x, y);
    },
    leave: () => {
      axis.setHover(null);
      reach?.(null, null);
    },
    click(x, y) {
      const { box } = frameOf();
      if (x >= box.x0 && x <= box.x1) pick?.(box.at(x), x, y);
    },
    double: () => axis.reset(),
    undoable: () => !axis.whole,
    drag(from, to, done) {
      const { box } = frameOf();
      hooks.brush = from && !done ? [box.at(from.x), box.at(to.x)].sort((a, b) => a - b) : null;
      if (from && done) axis.setView(box.at(from.x), box.at(to.x));
      frameOf().rehover();
    },
    key(event) {
      const used = keys(event);
      if (used) frameOf().say(told?.() ?? "");
      return used;
    },
  };
  function keys(event) {
    const [low, high] = axis.view;
    const stride = (axis.continuous ? (high - low) / 100 : 1) * (event.shiftKey ? 10 : 1);
    const to = (round) => axis.setHover(Math.max(low, Math.min(high, round)));
    if (event.key === "ArrowRight") to(axis.hover === null ? low : axis.hover + stride);
    else if (event.key === "ArrowLeft") to(axis.hover === null ? high : axis.hover - stride);
    else if (event.key === "Home") to(low);
    else if (event.key === "End") to(high);
    else if (event.key === "+" || event.key === "=") axis.zoom(0.5);
    else if (event.key === "-") axis.zoom(2);
    else if (event.key === "0" || (event.key === "Escape" && !axis.whole && axis.hover === null)) axis.reset();
    else if (event.key === "Escape" && axis.hover !== null) axis.setHover(null);
    else if (event.key === "[") axis.pan(-0.5);
    else if (event.key === "]") axis.pan(0.5);
    else if (event.key === "Enter" && axis.hover !== null && pick) pick(axis.hover, null, null);
    else if ((event.key === "ArrowUp" || event.key === "ArrowDown") && up) up(event.key === "ArrowUp" ? -1 : 1);
    else return false;
    return true;
  }
  return hooks;
}

/** The page's axis, or the chart's own; redraws the frame with it until the frame ends. */
export function joinAxis(given, options = {}) {
  const axis = given ?? new Axis(options);
  return {
    axis,
    own: !given,
    follow(frame) {
      const stop = axis.on((what) => (what === "hover" ? frame.rehover() : frame.redraw()));
      frame.signal.addEventListener("abort", stop);
    },
  };
}
