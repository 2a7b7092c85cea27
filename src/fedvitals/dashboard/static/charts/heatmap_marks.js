// SPDX-License-Identifier: Apache-2.0
// What lies on the cells of a heat map: ✕ for failed, a ring for NaN, triangles for infinities, findings as underlines.

import { severityColour, severityFill, theme } from "../colour.js";
import { DOWN, FAILED, NAN, UP, VALUE } from "./cells.js";
import { cross, shape } from "./pen.js";

const LEAST = 4; // pixels below which a mark would be illegible
const MOST = 6000; // marks in one picture; beyond, only the colours show it

export function paintOddities(pen, box, grid, { rowHeight }, [row0, row1], [column0, column1]) {
  const colours = theme();
  let left = MOST;
  for (let column = column0; column < column1; column += 1) {
    const [first, last] = [grid.columns[column], grid.last[column] ?? grid.columns[column]];
    const width = (last - first + 1) * box.step;
    const size = Math.min(width, rowHeight) * 0.5;
    if (size < LEAST / 2) continue;
    const x = box.x((first + last) / 2);
    for (let row = row0; row < row1 && left > 0; row += 1) {
      const state = grid.state[row * grid.columns.length + column];
      if (state === VALUE || state === 1) continue;
      left -= 1;
      paintOddCell(pen, state, x, row * rowHeight - box.scroll + rowHeight / 2, Math.min(size, 7), colours);
    }
  }
}

/** The mark of a cell without a finite value: a cross, a ring, or a triangle up or down. */
export function paintOddCell(pen, state, x, y, size, colours) {
  if (state === FAILED) cross(pen, x, y, size, { stroke: colours.critical, width: 1.5 });
  else if (state === NAN) pen.disc(x, y, Math.max(1, size / 3), { stroke: "#ffffff", width: 1 });
  else if (state === UP || state === DOWN) {
    const turn = state === UP ? -1 : 1;
    const half = size / 2;
    const fill = state === UP ? "#000000" : "#ffffff";
    pen.path([[x, y + turn * half, x + half, y - turn * half, x - half, y - turn * half]], { fill }, true);
  }
}

/** Findings: the rounds of a row underlined, with the severity's shape where they begin. */
export function paintMarks(pen, box, state, [row0, row1], rowHeight) {
  const colours = theme();
  for (const mark of state.marks) {
    const row = typeof mark.row === "number" ? mark.row : state.names.get(mark.row);
    const to = mark.to ?? box.high;
    if (row === undefined || row < row0 || row >= row1 || mark.from > box.high || to < box.low) continue;
    const colour = severityColour(mark.severity);
    const y = (row + 1) * rowHeight - box.scroll - 2;
    const half = box.step / 2;
    const [x0, x1] = [box.x(mark.from) - half, Math.max(box.x(to) + half, box.x(mark.from) - half + 3)];
    pen.line(x0, y, x1, y, { stroke: colours.paper, width: 4 });
    pen.line(x0, y, x1, y, { stroke: colour, width: 2 });
    if (rowHeight >= 10) {
      shape(pen, mark.severity, x0 + 6, y - rowHeight / 2 + 2, 12, { fill: colours.paper });
      shape(pen, mark.severity, x0 + 6, y - rowHeight / 2 + 2, 8, { fill: severityFill(mark.severity), stroke: colour });
    }
  }
}
