// SPDX-License-Identifier: Apache-2.0
// Points in the plane: which clients behave alike. Colour is the group, shape and ring the severity; names for
// troubles.

import { readable, seriesColour, severityColour, severityFill, severityRank, theme } from "../colour.js";
import { number } from "../format.js";
import { createFrame } from "./frame.js";
import { legend } from "./labels.js";
import { shape, textWidth } from "./pen.js";
import { nearest, picking } from "./picking.js";
import { differingNames } from "./rownames.js";
import { extent } from "./scales.js";
import { severityRow, troubled } from "./tip.js";

const NAMED = 30; // up to this many points are all named
const ROOM = 110; // pixels of a name

/** Options: {title, height, xLabel, yLabel, onPoint(point)}; data: {points, trail, note, reach: {x: [from, to], y}}. */
export function scatter(host, options = {}) {
  const state = { points: [], trails: [], spots: [], groups: [] };
  const hooks = picking(() => frame, {
    find: (x, y) => nearest(state.spots, x, y),
    count: () => state.points.length,
    pick: options.onPoint && ((at) => options.onPoint(state.points[at])),
    told: (at) => spoken(state.points[at]),
  });
  const chart = {
    ...hooks,
    height: (width) => options.height ?? Math.max(240, Math.min(520, width * 0.62)),
    layout: (width, height) => ({ x0: 16, x1: width - 16, y0: 12, y1: height - (options.xLabel ? 26 : 12) }),
    heavy: () => state.points.length > 1500,
    blank: () => (state.points.length ? null : "There are no points yet."),
    paint: (pen, box) => paint(pen, box, state, options, frame),
    paintHover: (pen, box) => paintHover(pen, box, state, hooks.chosen),
    readout: () => (hooks.chosen < 0 ? "" : state.points[hooks.chosen].name),
    tip: () => (hooks.chosen < 0 ? null : tip(state.points[hooks.chosen])),
    summary: () => summary(state, options),
    csv: () => [["name", "x", "y", "group", "severity"], ...state.points.map((one) => [one.name, one.x, one.y, one.group, one.severity])],
    spot: () => state.spots[hooks.chosen] ?? null,
  };
  const frame = createFrame(host, "scatter", options, chart);
  return {
    frame,
    update({ points = [], trail = null, note = "", reach = null } = {}) {
      const finite = points.filter((one) => Number.isFinite(one.x ?? NaN) && Number.isFinite(one.y ?? NaN));
      // Points with findings are drawn last, on top.
      state.points = [...finite].sort((a, b) => severityRank(a.severity) - severityRank(b.severity));
      state.reach = reach; // the smallest extent of the plane: equal for pictures that are compared
      state.trails = !trail ? [] : Array.isArray(trail[0]) ? trail : [trail];
      state.groups = [...new Set(finite.map((one) => one.group ?? ""))].sort();
      const lost = points.length - finite.length;
      frame.setNote([note, lost ? `${number(lost)} without a place` : ""].filter(Boolean).join(" · "));
      hooks.chosen = Math.min(hooks.chosen, state.points.length - 1);
      frame.fed();
    },
    destroy: () => frame.destroy(),
  };
}

/** One scale for both directions: distances in the picture are distances in the data. */
function plane(state, box) {
  const trail = state.trails.flat();
  const [left, right] = extent([...state.points, ...trail].map((one) => one.x), state.reach?.x ?? []);
  const [low, high] = extent([...state.points, ...trail].map((one) => one.y), state.reach?.y ?? []);
  const [wide, tall] = [right - left || 1, high - low || 1];
  const each = Math.min((box.x1 - box.x0 - 24) / wide, (box.y1 - box.y0 - 24) / tall);
  const [cx, cy] = [(box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2];
  return { x: (value) => cx + (value - (left + right) / 2) * each, y: (value) => cy - (value - (low + high) / 2) * each };
}

function colourOf(state, point, colours) {
  return seriesColour(Math.max(0, state.groups.indexOf(point.group ?? "")), colours);
}

function paint(pen, box, state, options, frame) {
  const colours = theme();
  const place = plane(state, box);
  pen.rect(box.x0, box.y0, box.x1 - box.x0, box.y1 - box.y0, { stroke: colours.line });
  for (const trail of state.trails) paintTrail(pen, trail, place, colours);
  state.spots = state.points.map((one) => ({ x: place.x(one.x), y: place.y(one.y) }));
  for (let at = 0; at < state.points.length; at += 1) {
    const point = state.points[at];
    const { x, y } = state.spots[at];
    const size = point.size ?? (state.points.length > 400 ? 6 : 9);
    const ill = severityRank(point.severity) > 0;
    if (ill) shape(pen, point.severity, x, y, size + 4, { fill: severityFill(point.severity), stroke: severityColour(point.severity) });
    else pen.disc(x, y, size / 2, { fill: colourOf(state, point, colours), stroke: colours.paper, width: 1, opacity: 0.85 });
  }
  paintNames(pen, box, state, colours);
  if (options.xLabel) pen.text((box.x0 + box.x1) / 2, box.y1 + 16, options.xLabel, { fill: colours.ink2, anchor: "middle" });
  if (options.yLabel) pen.text(box.x0 + 6, box.y0 + 14, options.yLabel, { fill: colours.ink2 });
  if (box.live) {
    const told = state.groups.length > 1 && state.groups.length <= 8 ? state.groups : [];
    legend(frame.dom.extra, told.map((group, at) => ({ name: String(group || "none"), colour: seriesColour(at, colours) })));
  }
}

/** Points with findings first; of the others only those whose name covers no point and no name. */
function paintNames(pen, box, state, colours) {
  const short = differingNames(state.points.map((point) => point.name), () => ROOM);
  const taken = state.points.length > NAMED ? [] : state.spots.map(({ x, y }) => [x - 5, y - 5, x + 5, y + 5]);
  for (let at = state.points.length - 1; at >= 0; at -= 1) {
    const point = { ...state.points[at], name: short[at] };
    const ill = severityRank(point.severity) > 0;
    if (!ill && state.points.length > NAMED) break;
    const { x, y } = state.spots[at];
    const width = Math.min(ROOM, textWidth(point.name));
    const left = x + width + 12 > box.x1;
    const room = left ? [x - 9 - width, y - 6, x - 9, y + 6] : [x + 9, y - 6, x + 9 + width, y + 6];
    if (!ill && taken.some((other) => other[0] < room[2] && other[2] > room[0] && other[1] < room[3] && other[3] > room[1])) continue;
    taken.push(room);
    paintName(pen, point, x, y, left, ill, colours);
  }
}

function paintName(pen, point, x, y, left, ill, colours) {
  const fill = ill ? readable(severityColour(point.severity), colours) : colours.ink2;
  const style = { fill, weight: ill ? 600 : 400, anchor: left ? "end" : "start", room: ROOM, halo: colours.paper };
  pen.text(left ? x - 9 : x + 9, y + 4, point.name, style);
}

/** A trail through the rounds: faint at its beginning, an open ring at the current position. */
function paintTrail(pen, trail, place, colours) {
  const points = trail.filter((one) => Number.isFinite(one.x ?? NaN) && Number.isFinite(one.y ?? NaN));
  for (let at = 1; at < points.length; at += 1) {
    const [from, to] = [points[at - 1], points[at]];
    const style = { stroke: colours.ink2, width: 1.25, opacity: 0.2 + (0.7 * at) / points.length };
    pen.line(place.x(from.x), place.y(from.y), place.x(to.x), place.y(to.y), style);
  }
  const last = points.at(-1);
  if (last) pen.disc(place.x(last.x), place.y(last.y), 7, { stroke: colours.ink2, width: 1.25 });
}

function paintHover(pen, box, state, chosen) {
  const spot = state.spots[chosen];
  if (!spot) return;
  const colours = theme();
  pen.disc(spot.x, spot.y, 9, { stroke: colours.ink, width: 1.5 });
  const style = { fill: colours.ink, weight: 600, room: 160, halo: colours.paper };
  pen.text(Math.min(spot.x, box.x1 - 80), Math.max(12, spot.y - 13), state.points[chosen].name, style);
}

function tip(point) {
  const rows = [{ name: "x", value: number(point.x) }, { name: "y", value: number(point.y) }];
  if (point.group !== undefined && point.group !== null && point.group !== "") rows.unshift({ name: "group", value: String(point.group) });
  return { head: point.name, rows: [...severityRow(point.severity), ...rows], foot: point.detail ?? "" };
}

function spoken(point) {
  const severity = severityRank(point.severity) ? point.severity : "";
  return [point.name, point.group, severity, `x ${number(point.x)}, y ${number(point.y)}`].filter(Boolean).join(", ");
}

function summary(state, options) {
  const ill = state.points.filter((one) => severityRank(one.severity) > 1).map((one) => one.name);
  const size = `${number(state.points.length)} points in ${number(state.groups.length)} groups`;
  return `${options.title ?? "Scatter"}, ${size}; ${troubled(ill)}`;
}
