// SPDX-License-Identifier: Apache-2.0
// Lengths side by side: one bar per item, its name a link, its value as text.

import { severityColour, severityFill, severityRank, theme } from "../colour.js";
import { exactly, withUnit } from "../format.js";
import { createFrame } from "./frame.js";
import { picking } from "./picking.js";
import { shape, textWidth } from "./pen.js";
import { rowNames } from "./rownames.js";
import { severityRow } from "./tip.js";

const ROW = 22;

/** Options: {title, unit, maxHeight, onBar(bar)}; data: {bars: [{name, value, of, mark, href, severity, text}], note}. */
export function bars(host, options = {}) {
  const state = { bars: [], most: 1 };
  const hooks = picking(() => frame, {
    find: (x, y) => {
      const at = Math.floor((y + frame.box.scroll) / ROW);
      return at >= 0 && at < state.bars.length ? at : -1;
    },
    count: () => state.bars.length,
    pick: options.onBar && ((at) => options.onBar(state.bars[at])),
    told: (at) => `${state.bars[at].name}, ${said(state.bars[at], options)}`,
  });
  const chart = {
    ...hooks,
    scrolls: true,
    height: () => state.bars.length * ROW,
    layout: (width) => gutters(state.bars, width, options),
    heavy: () => false,
    blank: () => (state.bars.length ? null : "Nothing to show yet."),
    paint: (pen, box) => paint(pen, box, state, options),
    paintHover(pen, box) {
      if (hooks.chosen < 0) return;
      pen.rect(box.x0 - 1, hooks.chosen * ROW - box.scroll + 2, box.x1 - box.x0 + 2, ROW - 4, { stroke: theme().ink2, opacity: 0.6 });
    },
    rows: (node, box) => rowNames(node, namesOf(state, box)),
    tip: () => (hooks.chosen < 0 ? null : tip(state.bars[hooks.chosen], options)),
    summary: () => `${options.title ?? "Bars"}; ${state.bars.slice(0, 5).map((bar) => `${bar.name} ${said(bar, options)}`).join(", ")}`,
    csv: () => [["name", "value", "of", "severity"], ...state.bars.map((bar) => [bar.name, bar.value, bar.of, bar.severity])],
    spot: () => ({ x: frame.box.x0 + 40, y: (hooks.chosen + 1) * ROW - frame.box.scroll }),
  };
  const frame = createFrame(host, "bars", { maxHeight: 1e6, ...options }, chart);
  return {
    frame,
    update({ bars: list = [], note = "" } = {}) {
      state.bars = list;
      state.most = list.reduce((most, bar) => Math.max(most, size(bar.value), size(bar.of), size(bar.mark)), 0) || 1;
      hooks.chosen = Math.min(hooks.chosen, list.length - 1);
      frame.setNote(note);
      frame.fed();
    },
    destroy: () => frame.destroy(),
  };
}

const size = (value) => (Number.isFinite(value ?? NaN) ? Math.abs(value) : 0);
const said = (bar, options) => bar.text ?? withUnit(bar.value, options.unit);

function namesOf(state, box) {
  const name = ([bar, at]) => ({ name: bar.name, href: bar.href, y: at * ROW - box.scroll, height: ROW, room: box.x0 - 10 });
  return inSight(state, box).map(name);
}

/** Room for the names at the left and for the texts at the right: as much as they need, up to 38 % of the width. */
function gutters(list, width, options) {
  const widest = (texts) => texts.slice(0, 400).reduce((most, text) => Math.max(most, textWidth(text)), 0) + 14;
  const room = (texts, usual) => Math.max(usual, Math.min(0.38 * width, widest(texts)));
  const [left, right] = width < 560 ? [48, 60] : [120, 132];
  return { x0: room(list.map((bar) => bar.name), left), x1: width - room(list.map((bar) => said(bar, options)), right) };
}

function inSight(state, box) {
  const [first, last] = [Math.floor(box.scroll / ROW), Math.ceil((box.scroll + box.height) / ROW)];
  return state.bars.slice(first, last).map((bar, at) => [bar, first + at]);
}

function paint(pen, box, state, options) {
  const colours = theme();
  const room = box.x1 - box.x0;
  for (const [bar, at] of inSight(state, box)) {
    const y = at * ROW - box.scroll;
    const ill = severityRank(bar.severity) > 0;
    if (size(bar.of)) pen.rect(box.x0, y + 6, (size(bar.of) / state.most) * room, ROW - 12, { fill: colours.line, opacity: 0.6 });
    const length = (size(bar.value) / state.most) * room;
    const colour = bar.colour ?? (ill ? severityFill(bar.severity, colours) : colours.accent);
    if (length > 0) pen.rect(box.x0, y + 5, Math.max(1, length), ROW - 10, { fill: colour });
    if (size(bar.mark)) pen.rect(box.x0 + (size(bar.mark) / state.most) * room - 1, y + 2, 2, ROW - 4, { fill: colours.ink });
    const x = box.x1 + 8;
    const sign = { fill: severityFill(bar.severity, colours), stroke: severityColour(bar.severity, colours) };
    if (ill) shape(pen, bar.severity, x + 4, y + ROW / 2, 9, sign);
    pen.text(ill ? x + 14 : x, y + ROW / 2 + 4, said(bar, options), { fill: colours.ink, room: box.width - x - (ill ? 16 : 2) });
    if (!box.live) pen.text(box.x0 - 10, y + ROW / 2 + 4, bar.name, { fill: colours.ink2, anchor: "end", room: box.x0 - 14 });
  }
  pen.line(box.x0, 2, box.x0, Math.min(box.height, state.bars.length * ROW) - 2, { stroke: colours.line });
}

function tip(bar, options) {
  const rows = [{ name: "value", value: exactly(bar.value, options.unit) }];
  if (size(bar.of)) rows.push({ name: "of", value: withUnit(bar.of, options.unit) });
  return { head: bar.name, rows: [...rows, ...severityRow(bar.severity)], foot: bar.text ?? "" };
}
