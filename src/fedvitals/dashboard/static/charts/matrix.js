// SPDX-License-Identifier: Apache-2.0
// Everyone against everyone: a square of cells, with lines between the groups found by a clustering.

import { theme } from "../colour.js";
import { exact, number } from "../format.js";
import { DOWN, NAN, UP, VALUE, paintCells, scaleFor } from "./cells.js";
import { shortest32 } from "./download.js";
import { createFrame } from "./frame.js";
import { paintOddCell } from "./heatmap_marks.js";
import { textWidth } from "./pen.js";
import { differingNames } from "./rownames.js";
import { extent } from "./scales.js";
import { colourStrip } from "./strip.js";

const COSTLY = 100_000; // cells that are only painted when they become visible
const TALLEST = 640; // pixels
const MARKED = 4; // size of a cell in pixels from which it has room for a mark
const LABEL = 10; // size of a cell in pixels from which every name fits

/** Options: {title, colours, unit, onCell(row, column)}; data: {rows, columns, values, groups, low, high, note}. */
export function matrix(host, options = {}) {
  const state = { rows: [], columns: [], grid: null, groups: null, scale: null, row: -1, column: -1 };
  const there = () => state.row >= 0 && state.column >= 0;
  const value = () => shortest32(state.grid.values[state.row * state.columns.length + state.column]);
  const pair = () => [state.rows[state.row], state.columns[state.column]];
  const pick = () => there() && options.onCell?.(...pair(), { row: state.row, column: state.column });
  const chart = {
    height: (width) => side(state, width) * (state.rows.length / Math.max(1, state.columns.length)) + 8 + names(state.columns, width),
    layout: (width) => {
      const [left, across] = [names(state.rows, width), side(state, width)];
      const cell = across / state.columns.length;
      return { x0: left, x1: left + across, y0: 4, y1: 4 + cell * state.rows.length, cell, below: names(state.columns, width) };
    },
    heavy: () => true,
    costly: () => state.rows.length * state.columns.length > COSTLY,
    blank: () => (state.rows.length && state.columns.length ? null : "There is nothing to compare yet."),
    paint: (pen, box) => paint(pen, box, state, frame, options),
    paintHover: (pen, box) => paintHover(pen, box, state),
    move(x, y) {
      const { x0, y0, cell } = frame.box;
      state.column = inside(Math.floor((x - x0) / cell), state.columns.length);
      state.row = inside(Math.floor((y - y0) / cell), state.rows.length);
    },
    leave: () => Object.assign(state, { row: -1, column: -1 }),
    click: pick,
    key: (event) => walk(event, state, pick, () => frame.say([...pair(), number(value())].join(", "))),
    readout: () => (there() ? `${pair().join(" · ")}  ${number(value())}` : ""),
    tip: () => (there() ? { head: pair().join(" · "), rows: [{ name: options.unit || "value", value: exact(value()) }] } : null),
    summary: () => summary(state, options),
    csv: () => csv(state),
    spot: () => ({ x: frame.box.x0 + (state.column + 1) * frame.box.cell, y: frame.box.y0 + (state.row + 1) * frame.box.cell }),
  };
  const frame = createFrame(host, "matrix", options, chart);
  return {
    frame,
    update({ rows = [], columns = rows, values = new Float32Array(0), groups = null, low = null, high = null, note = "" } = {}) {
      const state32 = Uint8Array.from(values, (one) => (Number.isFinite(one) ? VALUE : Number.isNaN(one) ? NAN : one > 0 ? UP : DOWN));
      const [smallest, largest] = extent(values).map((one) => (Number.isFinite(one) ? one : 0));
      const grid = { columns, values, state: state32, low: low ?? smallest, high: high ?? largest, smallest, largest };
      const scale = scaleFor(grid, { colours: options.colours });
      Object.assign(state, { rows, columns, groups, grid, scale, row: -1, column: -1, picture: null });
      frame.setNote(note);
      frame.fed();
    },
    destroy: () => frame.destroy(),
  };
}

function summary({ rows, columns, grid }, options) {
  const size = `${number(rows.length)} by ${number(columns.length)}`;
  return `${options.title ?? "Matrix"}, ${size}; values ${number(grid.smallest)} to ${number(grid.largest)}`;
}

const inside = (at, count) => (at >= 0 && at < count ? at : -1);

/** Pixels for the names of the rows, or of the columns below. */
function names(list, width) {
  const longest = list.slice(0, 400).reduce((most, name) => Math.max(most, textWidth(name)), 0);
  return Math.max(24, Math.min(width < 560 ? 96 : 120, longest + 12));
}

/** The length of the square's side: cells of at most 36 pixels, smaller with many rows, as far as the page has room. */
function side(state, width) {
  const cell = Math.max(LABEL + 4, Math.min(36, TALLEST / Math.max(1, state.rows.length)));
  return Math.max(40, Math.min(width - names(state.rows, width) - 8, TALLEST, state.columns.length * cell));
}

function walk(event, state, pick, told) {
  const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (step) {
    state.row = Math.max(0, Math.min(state.rows.length - 1, state.row < 0 ? 0 : state.row + step[0]));
    state.column = Math.max(0, Math.min(state.columns.length - 1, state.column < 0 ? 0 : state.column + step[1]));
    told();
    return true;
  }
  if (event.key === "Enter") pick();
  else if (event.key === "Escape" && state.row >= 0) Object.assign(state, { row: -1, column: -1 });
  else return false;
  return true;
}

function paint(pen, box, state, frame, options) {
  const colours = theme();
  const image = pictureOf(state, colours);
  if (pen.context && box.cell < 1) {
    // With more cells than pixels, the mean under a pixel is what matters in a similarity matrix.
    pen.context.imageSmoothingEnabled = true;
    pen.context.imageSmoothingQuality = "high";
    pen.context.drawImage(image, box.x0, box.y0, box.x1 - box.x0, box.y1 - box.y0);
  } else {
    pen.image(image, box.x0, box.y0, box.x1 - box.x0, box.y1 - box.y0);
  }
  paintGroups(pen, box, state, colours);
  paintMarks(pen, box, state, colours);
  const every = Math.max(1, Math.ceil(LABEL / box.cell));
  const beside = differingNames(state.rows, () => box.x0 - 10);
  const below = differingNames(state.columns, () => box.below - 8);
  for (let row = 0; row < state.rows.length; row += every) {
    pen.text(box.x0 - 6, box.y0 + (row + 0.5) * box.cell + 4, beside[row], { fill: colours.ink2, anchor: "end", room: box.x0 - 10 });
  }
  for (let column = 0; column < state.columns.length; column += every) {
    const x = box.x0 + (column + 0.5) * box.cell + 4;
    pen.text(x, box.y1 + 6, below[column], { fill: colours.ink2, anchor: "end", turn: -90, room: box.below - 8 });
  }
  if (box.live) colourStrip(frame.dom.extra, state.scale, { unit: options.unit, smallest: state.grid.smallest, largest: state.grid.largest });
}

/** A million cells are painted once per theme, not with each redraw. */
function pictureOf(state, colours) {
  const key = `${colours.dark}`;
  if (state.picture?.key !== key) {
    const cells = paintCells(state.grid, state.scale, [0, state.rows.length], [0, state.columns.length]);
    const canvas = Object.assign(document.createElement("canvas"), { width: cells.width, height: cells.height });
    canvas.getContext("2d").drawImage(cells, 0, 0);
    state.picture = { key, canvas };
  }
  return state.picture.canvas;
}

function paintGroups(pen, box, state, colours) {
  if (!state.groups) return;
  for (let at = 1; at < state.groups.length; at += 1) {
    if (state.groups[at] === state.groups[at - 1]) continue;
    const shift = at * box.cell;
    pen.line(box.x0, box.y0 + shift, box.x1, box.y0 + shift, { stroke: colours.paper, width: 2 });
    if (state.columns.length !== state.rows.length) continue;
    pen.line(box.x0 + shift, box.y0, box.x0 + shift, box.y1, { stroke: colours.paper, width: 2 });
  }
}

/** NaN and infinity have a mark, as in a heat map, if a cell has room for it. */
function paintMarks(pen, box, { grid, columns }, colours) {
  if (box.cell < MARKED) return;
  const size = Math.min(box.cell * 0.5, 7);
  grid.state.forEach((state, at) => {
    if (state === VALUE) return;
    const [row, column] = [Math.floor(at / columns.length), at % columns.length];
    paintOddCell(pen, state, box.x0 + (column + 0.5) * box.cell, box.y0 + (row + 0.5) * box.cell, size, colours);
  });
}

function paintHover(pen, box, state) {
  if (state.row < 0 || state.column < 0) return;
  const colours = theme();
  const [x, y] = [box.x0 + state.column * box.cell, box.y0 + state.row * box.cell];
  const size = Math.max(3, box.cell);
  pen.rect(box.x0, y, box.x1 - box.x0, size, { stroke: colours.ink, opacity: 0.35 });
  pen.rect(x, box.y0, size, box.y1 - box.y0, { stroke: colours.ink, opacity: 0.35 });
  pen.rect(x, y, size, size, { stroke: colours.paper, width: 3 });
  pen.rect(x, y, size, size, { stroke: colours.ink, width: 1.5 });
}

function* csv(state) {
  yield ["", ...state.columns];
  const width = state.columns.length;
  for (let row = 0; row < state.rows.length; row += 1) {
    yield [state.rows[row], ...Array.from(state.grid.values.slice(row * width, (row + 1) * width), shortest32)];
  }
}
