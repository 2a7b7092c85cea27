// SPDX-License-Identifier: Apache-2.0
// Rows × rounds on canvas: clients or layers against time. Only the visible rows are drawn; names are links.

import { theme } from "../colour.js";
import { brief, exactly, number, withUnit } from "../format.js";
import { ABSENT, hatching, paintCells, SAID, scaleFor, VALUE } from "./cells.js";
import { shortest32 } from "./download.js";
import { createFrame } from "./frame.js";
import { paintMarks, paintOddities } from "./heatmap_marks.js";
import { textSize, textWidth } from "./pen.js";
import { paintRowNames, rowNames } from "./rownames.js";
import { flagRows, joinAxis, onAxis, paintBrush, paintCrosshair, paintFlags, paintRounds, roundBox } from "./rounds.js";
import { colourStrip } from "./strip.js";
import { severityRow } from "./tip.js";
import { firstAt } from "./tracks.js";

const FOOT = 24;

/**
 * Options: {title, unit, axis, rowHeight, maxHeight, colours, log, onCell(row, column), rowHref(row), selected(row)}: a
 * row is identified by its name, a column by its round. Data: {grid: a decoded Grid, flags, marks: [{row, from, to,
 * severity}]}.
 */
export function heatMap(host, options = {}) {
  const joined = joinAxis(options.axis);
  const { axis } = joined;
  const state = { grid: null, flags: [], marks: [], row: -1, scale: null, rowHeight: options.rowHeight ?? 14, names: new Map() };
  const hooks = onAxis(axis, () => frame, {
    pick(round, x, y) {
      if (y !== null) state.row = rowAt(state, frame.box, y); // a tap comes without a preceding move
      pick(state, round, options);
    },
    reach: (x, y) => (state.row = y === null ? -1 : rowAt(state, frame.box, y)),
    up: (step) => walk(state, frame, step),
    told: () => spoken(state, axis, options),
  });
  const chart = {
    ...hooks,
    scrolls: true,
    footHeight: FOOT,
    heavy: () => true,
    blank: () => (state.grid && state.grid.rows.length && state.grid.columns.length ? null : "Nothing was recorded for this yet."),
    height: () => state.grid.rows.length * state.rowHeight,
    layout: (width, height) => roundBox(width, height, axis, { top: 0, bottom: 0 }),
    paint: (pen, box) => paint(pen, box, state, frame, options),
    paintFoot(pen, box) {
      paintRounds(pen, box, axis, 1, null);
      paintFlags(pen, box, state.flags, 1);
    },
    paintHover: (pen, box) => paintHover(pen, box, state, axis, hooks),
    rows: (node, box) => rowNames(node, namesOf(state, box, options)),
    readout: () => (axis.hover === null ? "" : readout(state, axis, options)),
    tip: () => tip(state, axis, options),
    summary: () => summary(state, axis, options),
    csv: () => csv(state.grid),
    spot: () => ({ x: frame.box.x(axis.hover ?? axis.view[0]), y: (state.row + 1) * state.rowHeight - frame.box.scroll }),
  };
  const frame = createFrame(host, "heatmap", { maxHeight: 1e6, ...options, axis }, chart);
  joined.follow(frame);
  return {
    frame,
    update({ grid = null, flags = [], marks = [], note } = {}) {
      Object.assign(state, { grid, flags, marks });
      if (note !== undefined) frame.setNote(note);
      if (grid?.columns.length) {
        state.scale = scaleFor(grid, options);
        state.names = new Map(grid.rows.map((name, at) => [name, at]));
        axis.roomForNames(grid.rows.slice(0, 400).reduce((most, name) => Math.max(most, textWidth(name)), 0));
        axis.extend(grid.columns[0], grid.last.at(-1) ?? grid.columns.at(-1));
      }
      frame.fed();
    },
    destroy: () => frame.destroy(),
  };
}

function rowAt(state, box, y) {
  const row = Math.floor((y + box.scroll) / state.rowHeight);
  return row >= 0 && row < state.grid.rows.length ? row : -1;
}

/** The column that contains a round; −1 between columns. */
function columnAt(grid, round) {
  const at = firstAt(grid.columns, round + 1) - 1;
  return at >= 0 && round <= (grid.last[at] ?? grid.columns[at]) ? at : -1;
}

function pick(state, round, options) {
  const column = columnAt(state.grid, round);
  if (state.row >= 0 && column >= 0) options.onCell?.(state.grid.rows[state.row], round, { row: state.row, column });
}

function walk(state, frame, step) {
  const { box } = frame;
  state.row = Math.max(0, Math.min(state.grid.rows.length - 1, state.row + step));
  const top = state.row * state.rowHeight;
  const { scroller } = frame.dom;
  if (top < box.scroll) scroller.scrollTop = top;
  else if (top + state.rowHeight > box.scroll + box.height) scroller.scrollTop = top + state.rowHeight - box.height;
}

function rowsInSight(state, box) {
  const first = Math.floor(box.scroll / state.rowHeight);
  return [first, Math.min(state.grid.rows.length, Math.ceil((box.scroll + box.height) / state.rowHeight))];
}

function paint(pen, box, state, frame, options) {
  const { grid, rowHeight } = state;
  const rows = rowsInSight(state, box);
  const columns = [Math.max(0, firstAt(grid.columns, box.low + 1) - 1), firstAt(grid.columns, box.high + 1)];
  const colours = theme();
  const top = rows[0] * rowHeight - box.scroll;
  const bottom = Math.min(box.height, rows[1] * rowHeight - box.scroll);
  pen.clip(box.x0, 0, box.x1 - box.x0, bottom, (inner) => {
    paintHatch(inner, box, bottom, colours);
    for (const [from, to] of stretches(grid, columns)) {
      const half = box.step / 2;
      const [x0, x1] = [box.x(grid.columns[from]) - half, box.x(grid.last[to - 1] ?? grid.columns[to - 1]) + half];
      const most = (Math.min(x1, box.width) - Math.max(x0, 0)) * (window.devicePixelRatio || 1);
      const image = paintCells(grid, state.scale, rows, [from, to], { most: Math.max(1, most) });
      inner.image(image, x0, top, x1 - x0, (rows[1] - rows[0]) * rowHeight);
    }
    if (rowHeight >= 6) {
      // Hairlines in the paper's colour guide the eye along its row.
      for (let row = rows[0] + 1; row < rows[1]; row += 1) {
        const y = row * rowHeight - box.scroll;
        inner.rect(box.x0, y - 0.5, box.x1 - box.x0, 1, { fill: colours.paper });
      }
    }
    paintOddities(inner, box, grid, state, rows, columns);
    paintMarks(inner, box, state, rows, rowHeight);
  });
  if (!box.narrow) paintLast(pen, box, state, rows, options);
  if (box.live) colourStrip(frame.dom.extra, state.scale, { unit: options.unit, smallest: grid.smallest, largest: grid.largest });
  else paintRowNames(pen, box, namesOf(state, box, options));
}

/** Runs of columns in equal steps: each is one stretched picture. */
function stretches(grid, [from, to]) {
  const found = [];
  let start = from;
  const length = (at) => (grid.last[at] ?? grid.columns[at]) - grid.columns[at] + 1;
  for (let at = from + 1; at <= to; at += 1) {
    const follows = at < to && grid.columns[at] === grid.columns[at - 1] + length(at - 1) && length(at) === length(start);
    if (!follows) {
      found.push([start, at]);
      start = at;
    }
  }
  return found;
}

function paintHatch(pen, box, bottom, colours) {
  const tile = hatching(colours);
  if (!pen.context) {
    // An SVG gets the hatching as one picture: a pattern would need an id that is unique in the reader's document.
    const canvas = Object.assign(document.createElement("canvas"), { width: Math.ceil(box.x1 - box.x0), height: Math.ceil(bottom) });
    const context = canvas.getContext("2d");
    context.fillStyle = context.createPattern(tile, "repeat");
    context.fillRect(0, 0, canvas.width, canvas.height);
    pen.image(canvas, box.x0, 0, canvas.width, canvas.height);
    return;
  }
  pen.context.fillStyle = pen.context.createPattern(tile, "repeat");
  pen.context.fillRect(box.x0, 0, box.x1 - box.x0, bottom);
}

/** At the right of each row: its last visible value. */
function paintLast(pen, box, state, rows, options) {
  const { grid, rowHeight } = state;
  if (rowHeight < 10) return;
  const colours = theme();
  const end = firstAt(grid.columns, box.high + 1);
  for (let row = rows[0]; row < rows[1]; row += 1) {
    let column = end - 1;
    while (column >= 0 && grid.state[row * grid.columns.length + column] === ABSENT) column -= 1;
    if (column < 0) continue;
    const at = row * grid.columns.length + column;
    const said = grid.state[at] === VALUE ? brief(shortest32(grid.values[at]), options.unit) : SAID[grid.state[at]];
    const y = row * rowHeight - box.scroll + rowHeight / 2 + 4;
    pen.text(box.x1 + 8, y, said, { fill: colours.ink2, size: textSize() - 1, room: box.width - box.x1 - 20 });
  }
}

function namesOf(state, box, options) {
  const [first, last] = rowsInSight(state, box);
  // Under ten pixels names would overlap: then only every second, third, … is shown.
  const every = Math.max(1, Math.ceil(11 / state.rowHeight));
  const found = [];
  for (let row = Math.ceil(first / every) * every; row < last; row += every) {
    const name = state.grid.rows[row];
    const y = row * state.rowHeight - box.scroll;
    found.push({ name, y, height: state.rowHeight * every, room: box.x0 - 8, href: options.rowHref?.(name), chosen: options.selected?.(name) });
  }
  return found;
}

function paintHover(pen, box, state, axis, hooks) {
  paintBrush(pen, box, hooks.brush, 0, box.height);
  const colours = theme();
  paintCrosshair(pen, box, axis, { top: 0, bottom: box.height, number: false });
  if (state.row < 0) return;
  const y = state.row * state.rowHeight - box.scroll;
  pen.rect(box.x0 + 0.5, y - 0.5, box.x1 - box.x0 - 1, state.rowHeight, { stroke: colours.ink, opacity: 0.5 });
  const column = axis.hover === null ? -1 : columnAt(state.grid, axis.hover);
  if (column < 0) return;
  const half = box.step / 2;
  const [x0, x1] = [box.x(state.grid.columns[column]) - half, box.x(state.grid.last[column]) + half];
  pen.rect(x0, y - 0.5, Math.max(2, x1 - x0), state.rowHeight, { stroke: colours.paper, width: 3 });
  pen.rect(x0, y - 0.5, Math.max(2, x1 - x0), state.rowHeight, { stroke: colours.ink, width: 1.5 });
}

function cellAt(state, axis) {
  if (state.row < 0 || axis.hover === null || !state.grid) return null;
  const column = columnAt(state.grid, axis.hover);
  if (column < 0) return null;
  const at = state.row * state.grid.columns.length + column;
  const [first, last] = [state.grid.columns[column], state.grid.last[column] ?? state.grid.columns[column]];
  return { name: state.grid.rows[state.row], first, last, state: state.grid.state[at], value: shortest32(state.grid.values[at]) };
}

const columns = ({ first, last }, { label }) => (last > first ? `${label}s ${number(first)} to ${number(last)}` : `${label} ${number(first)}`);

function readout(state, axis, options) {
  const cell = cellAt(state, axis);
  if (!cell) return [`${axis.label} ${number(axis.hover)}`, ...marked(state, axis, options)].join(" · ");
  return `${cell.name} · ${cell.state === VALUE ? withUnit(cell.value, options.unit) : SAID[cell.state]}`;
}

/** The rows of a finding, with their values at the round that is pointed at elsewhere. */
function marked(state, axis, options) {
  const column = columnAt(state.grid, axis.hover);
  const rows = [...new Set(state.marks.map((mark) => (typeof mark.row === "number" ? mark.row : state.names.get(mark.row))))];
  return rows.filter((row) => column >= 0 && row !== undefined).slice(0, 3).map((row) => {
    const at = row * state.grid.columns.length + column;
    return `${state.grid.rows[row]} ${state.grid.state[at] === VALUE ? withUnit(shortest32(state.grid.values[at]), options.unit) : SAID[state.grid.state[at]]}`;
  });
}

function tip(state, axis, options) {
  const cell = cellAt(state, axis);
  if (!cell) return null;
  const value = cell.state === VALUE ? exactly(cell.value, options.unit) : SAID[cell.state];
  const unit = cell.state === VALUE && ["bytes", "seconds"].includes(options.unit) ? ` (${withUnit(cell.value, options.unit)})` : "";
  const rows = [{ name: options.unit && options.unit !== "1" ? options.unit : "value", value: value + unit }];
  for (const mark of state.marks) {
    const row = typeof mark.row === "number" ? mark.row : state.names.get(mark.row);
    if (row === state.row && mark.from <= axis.hover && axis.hover <= (mark.to ?? Infinity)) {
      const [sign] = severityRow(mark.severity);
      rows.push({ ...sign, name: mark.label ?? mark.severity, value: `since ${number(mark.from)}` });
    }
  }
  const foot = cell.last > cell.first ? "the most unusual value of these rounds" : "";
  return { head: `${cell.name} · ${columns(cell, axis)}`, rows: [...rows, ...flagRows(state.flags, axis.hover, 3)], foot };
}

function spoken(state, axis, options) {
  const cell = cellAt(state, axis);
  if (!cell) return axis.hover === null ? `${axis.label}s ${axis.view[0]} to ${axis.view[1]}` : `${axis.label} ${axis.hover}`;
  return `${cell.name}, ${columns(cell, axis)}, ${cell.state === VALUE ? withUnit(cell.value, options.unit) : SAID[cell.state]}`;
}

function summary(state, axis, options) {
  const { grid } = state;
  const parts = [`${options.title ?? "Heat map"}, ${number(grid.rows.length)} rows, ${axis.label}s ${axis.view[0]} to ${axis.view[1]}`];
  if (grid.smallest !== null && grid.smallest !== undefined) parts.push(`values ${number(grid.smallest)} to ${withUnit(grid.largest, options.unit)}`);
  parts.push(`first row ${grid.rows[0]}`, state.flags.length ? `${state.flags.length} findings marked` : "no finding marked");
  return parts.join("; ");
}

function* csv(grid) {
  yield ["row", "first round", "last round", "value", "state"];
  const width = grid.columns.length;
  for (let row = 0; row < grid.rows.length; row += 1) {
    for (let column = 0; column < width; column += 1) {
      const at = row * width + column;
      if (grid.state[at] === ABSENT) continue;
      const value = grid.state[at] === VALUE ? shortest32(grid.values[at]) : null;
      yield [grid.rows[row], grid.columns[column], grid.last[column] ?? grid.columns[column], value, SAID[grid.state[at]] || "value"];
    }
  }
}
