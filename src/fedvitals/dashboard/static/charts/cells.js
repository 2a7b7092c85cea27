// SPDX-License-Identifier: Apache-2.0
// A matrix as a picture with one pixel per cell, to be stretched. Cells without a value have a state.

import { colourTable, mix, rgb, theme } from "../colour.js";

export const VALUE = 0;
export const ABSENT = 1; // not sampled: nothing is drawn, the hatching behind it shows
export const FAILED = 2;
export const NAN = 3;
export const UP = 4; // +∞
export const DOWN = 5;

export const SAID = ["", "not there", "failed", "NaN", "+∞", "−∞"];

/** A value's position on its map, 0 to 1. */
export function shareOf(scale) {
  const { low, high, log, signed } = scale;
  if (signed) {
    const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
    return (value) => 0.5 + value / (2 * reach);
  }
  if (log) {
    const [from, to] = [Math.log(low), Math.log(high)];
    const span = to - from || 1;
    return (value) => (value > 0 ? (Math.log(value) - from) / span : 0);
  }
  const span = high - low || 1;
  return (value) => (value - low) / span;
}

/** The ends of a colour scale for a grid; a log scale begins at the smallest value that has a logarithm. */
export function scaleFor(grid, { colours = "even", log = false } = {}) {
  const signed = colours === "signed";
  let [low, high] = [grid.low ?? grid.smallest ?? 0, grid.high ?? grid.largest ?? 1];
  if (!(high > low)) [low, high] = [grid.smallest ?? low, grid.largest ?? high];
  if (log && !(low > 0)) {
    low = Infinity;
    for (let at = 0; at < grid.values.length; at += 1) {
      const value = grid.values[at];
      if (value > 0 && value < low && grid.state[at] === VALUE) low = value;
    }
    if (!Number.isFinite(low)) [low, high] = [0.1, 1];
  }
  if (log && !(high > low)) high = low * 10;
  return { low, high, log, signed, kind: signed ? "signed" : "even" };
}

let scratch = null;

function picture(width, height) {
  // One canvas for all: it is stretched onto the chart at once, and then free for the next.
  scratch ??= document.createElement("canvas");
  if (scratch.width !== width || scratch.height !== height) Object.assign(scratch, { width, height });
  const context = scratch.getContext("2d", { willReadFrequently: true });
  return { canvas: scratch, context, image: context.createImageData(width, height) };
}

/**
 * The cells [row0, row1) × [column0, column1) as a canvas, one pixel each. With more columns than `most` pixels,
 * several share one: the value furthest from the grid's median is kept, and trouble takes precedence over any value.
 */
export function paintCells(grid, scale, [row0, row1], [column0, column1], { order = null, most = Infinity } = {}) {
  const count = column1 - column0;
  const width = Math.max(1, Math.min(count, Math.floor(most)));
  const height = Math.max(1, row1 - row0);
  const { canvas, context, image } = picture(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const paints = palette(scale);
  const share = shareOf(scale);
  const columns = grid.columns.length;
  const middle = width < count ? share(medianOf(grid)) : 0;
  for (let row = row0; row < row1; row += 1) {
    const start = (order ? order[row] : row) * columns;
    const line = (row - row0) * width;
    for (let x = 0; x < width; x += 1) {
      const from = width === count ? column0 + x : column0 + Math.floor((x * count) / width);
      const to = width === count ? from + 1 : Math.max(from + 1, column0 + Math.floor(((x + 1) * count) / width));
      const at = to - from === 1 ? start + from : worst(grid, start + from, start + to, share, middle);
      const state = grid.state[at];
      const place = state === VALUE ? Math.max(0, Math.min(255, Math.round(share(grid.values[at]) * 255))) : 0;
      pixels[line + x] = state === VALUE ? paints.map[place] : paints.states[state];
    }
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const medians = new WeakMap();
const ENOUGH = 4096; // values used for a median

function medianOf(grid) {
  let middle = medians.get(grid);
  if (middle === undefined) {
    const every = Math.max(1, Math.floor(grid.values.length / ENOUGH));
    const some = [];
    for (let at = 0; at < grid.values.length; at += every) if (grid.state[at] === VALUE) some.push(grid.values[at]);
    middle = some.length ? some.sort((a, b) => a - b)[some.length >> 1] : 0;
    medians.set(grid, middle);
  }
  return middle;
}

function worst(grid, from, to, share, middle) {
  let [best, distance] = [from, -1];
  for (let at = from; at < to; at += 1) {
    const state = grid.state[at];
    const far = state === VALUE ? Math.abs(share(grid.values[at]) - middle) : state === ABSENT ? -0.5 : 1000;
    if (far > distance) [best, distance] = [at, far];
  }
  return best;
}

const packed = ([r, g, b], alpha = 255) => ((alpha << 24) | (b << 16) | (g << 8) | r) >>> 0;

let lately = { key: null, table: null };

function palette(scale) {
  const colours = theme();
  const key = `${scale.kind} ${colours.dark} ${colours.paper2}`;
  if (lately.key !== key) {
    const table = colourTable(scale.kind, colours);
    const map = new Uint32Array(256);
    for (let at = 0; at < 256; at += 1) map[at] = packed([table[at * 3], table[at * 3 + 1], table[at * 3 + 2]]);
    const failed = packed(rgb(colours.paper2));
    lately = { key, table: { map, states: Uint32Array.of(0, 0, failed, packed([0, 0, 0]), map[255], map[0]) } };
  }
  return lately.table;
}

let hatch = { key: null, pattern: null };

/** Grey hatching, as a canvas tile. */
export function hatching(colours = theme()) {
  const key = `${colours.paper2} ${colours.line} ${colours.dark}`;
  if (hatch.key !== key) {
    const tile = Object.assign(document.createElement("canvas"), { width: 6, height: 6 });
    const context = tile.getContext("2d");
    context.fillStyle = colours.paper2;
    context.fillRect(0, 0, 6, 6);
    context.strokeStyle = mix(colours.line, colours.ink2, colours.dark ? 0.35 : 0.2);
    context.lineWidth = 1;
    context.beginPath();
    for (const shift of [-6, 0, 6]) {
      context.moveTo(shift - 1, 7);
      context.lineTo(shift + 7, -1);
    }
    context.stroke();
    hatch = { key, pattern: tile };
  }
  return hatch.pattern;
}
