// SPDX-License-Identifier: Apache-2.0
// What the tests ask the gallery: where things stand, what colour they have.

import { Axis, bindAxis } from "/static/charts/index.js";
import { csvText } from "/static/charts/download.js";
import * as format from "/static/format.js";
import { band, ill, losses } from "/invented.js";

const frameOf = (name) => window.gallery.charts[name].frame;

function pixels(name, x, y, width, height) {
  const { dom, box } = frameOf(name);
  const ratio = dom.canvas.width / box.width;
  return dom.canvas.getContext("2d").getImageData(Math.floor(x * ratio), Math.floor(y * ratio), width, height).data;
}

/** Where a round (and, on a heat map, a row) is on the screen. */
export function place([name, round, row]) {
  const { dom, box } = frameOf(name);
  const at = dom.plot.getBoundingClientRect();
  const y = dom.scroller ? row * 14 + 7 - box.scroll : (box.y0 + box.y1) / 2;
  return { x: at.left + box.x(round), y: at.top + y };
}

/** The colour on a chart's canvas, y in its own pixels. */
export function pixel([name, round, y]) {
  return [...pixels(name, frameOf(name).box.x(round), y, 1, 1)];
}

/** Of a patch: how far its colours are from grey at most, and how many kinds of that there are. */
export function greys([name, round, y]) {
  const data = pixels(name, frameOf(name).box.x(round) - 6, y, 12, 10);
  const seen = new Set();
  for (let at = 0; at < data.length; at += 4) {
    const three = [data[at], data[at + 1], data[at + 2]];
    seen.add(`${three}`);
    seen.spread = Math.max(seen.spread ?? 0, Math.max(...three) - Math.min(...three));
  }
  return { spread: seen.spread, kinds: seen.size };
}

/** The highest and the lowest blue pixel at a round, as shares of the plot's height from its top. */
export function inked([name, round]) {
  const { dom, box } = frameOf(name);
  const data = pixels(name, box.x(round) - 2, 0, 5, dom.canvas.height);
  const ratio = dom.canvas.width / box.width;
  const rows = [];
  for (let at = 0; at < data.length; at += 4) {
    if (data[at + 3] > 100 && data[at + 2] > data[at] + 60) rows.push(Math.floor(at / 20) / ratio);
  }
  return [Math.min(...rows), Math.max(...rows)].map((y) => (y - box.y0) / (box.y1 - box.y0));
}

export const labels = () => Object.values(window.gallery.charts).map(({ frame }) => frame.dom.plot.getAttribute("aria-label"));

export const crosshairs = () =>
  Object.values(window.gallery.charts).map(({ frame }) => Number(frame.dom.over.querySelector("line").getAttribute("x1")));

export const views = () => Object.values(window.gallery.charts).map(({ frame }) => [frame.box.low, frame.box.high]);

export function grow(count) {
  window.gallery.charts.accuracy.update({ bands: [band(count)], series: [ill(count)], flags: [] });
}

export const stored = () => ({ line: ill(40).values.map(String), cell: losses(20, 40).values[0] });

export const table = (rows) => csvText(rows);

/** The paths of a colour in an SVG chart, and where its circles stand. */
export function drawn([name, colour]) {
  const { svg } = frameOf(name).dom;
  const paths = [...svg.querySelectorAll("path")].filter((path) => path.getAttribute("stroke") === colour);
  return {
    paths: paths.map((path) => path.getAttribute("d")),
    circles: [...svg.querySelectorAll("circle")].map((one) => Number(one.getAttribute("cx"))),
  };
}

/** What an axis and an address say to each other. */
export function bound(query) {
  const asked = {};
  const address = new URLSearchParams(query);
  const params = { get: (name, other) => address.get(name) ?? other, set: (changes) => Object.assign(asked, changes) };
  const axis = new Axis();
  const stop = bindAxis(axis, params);
  axis.extend(1, 40);
  const first = [...axis.view];
  axis.setView(7, 8);
  const zoomed = { ...asked };
  axis.reset();
  stop();
  return { first, zoomed, all: asked, left: axis.listeners.size };
}

/** Each [function, …arguments] of the formats, with plain spaces. */
export const written = (calls) => calls.map(([name, ...given]) => format[name](...given).replaceAll("\u202f", " "));
