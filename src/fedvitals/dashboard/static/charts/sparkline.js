// SPDX-License-Identifier: Apache-2.0
// A line chart the size of a word.

import { s } from "../dom.js";
import { extent, honestEnds } from "./scales.js";
import { track } from "./tracks.js";

/** An SVG node; colours come from CSS (currentColor), so it needs no redrawing when the theme changes. */
export function sparkline(values, { width = 96, height = 20, label = "", unit = "" } = {}) {
  const list = values ?? [];
  const [low, high] = extent(list);
  const svg = s("svg", {
    class: "sparkline", width, height, viewBox: `0 0 ${width} ${height}`,
    ...(label ? { role: "img", "aria-label": label } : { "aria-hidden": "true" }),
  });
  if (!(low <= high)) return svg;
  const pad = 3;
  const step = (width - 2 * pad) / Math.max(1, list.length - 1);
  const x = (at) => pad + at * step;
  const [floor, top] = honestEnds(low, high, unit);
  const y = (value) => (top > floor ? height - pad - ((value - floor) / (top - floor)) * (height - 2 * pad) : height / 2);
  const places = Array.from(list, (_, at) => at);
  const { lines, dots } = track(places, list, { x, y, low: 0, high: list.length, step });
  const round = (value) => Math.round(value * 10) / 10;
  const drawn = (text, value, at) => text + (at % 2 ? ` ${round(value)}` : `${at ? "L" : "M"}${round(value)}`);
  const path = lines.map((points) => points.reduce(drawn, "")).join("");
  svg.append(s("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": 1.25, "stroke-linejoin": "round", opacity: 0.75 }));
  for (const [px, py] of dots) svg.append(s("circle", { cx: round(px), cy: round(py), r: 1.25, fill: "currentColor" }));
  for (let at = list.length - 1; at >= 0; at -= 1) {
    if (typeof list[at] === "number" && Number.isFinite(list[at])) {
      svg.append(s("circle", { cx: round(x(at)), cy: round(y(list[at])), r: 2, fill: "currentColor" }));
      break;
    }
  }
  return svg;
}
