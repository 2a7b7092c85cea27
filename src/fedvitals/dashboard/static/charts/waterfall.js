// SPDX-License-Identifier: Apache-2.0
// A round as a waterfall: one lane per node, its parts along the seconds, the critical path outlined. Canvas.

import { partColour, theme } from "../colour.js";
import { number, seconds } from "../format.js";
import { createFrame } from "./frame.js";
import { legend } from "./labels.js";
import { textSize, textWidth } from "./pen.js";
import { paintRowNames, rowNames } from "./rownames.js";
import { joinAxis, onAxis, paintBrush, paintCrosshair, paintRounds, roundBox } from "./rounds.js";

const LANE = 18;
const FOOT = 24;
const BOLD = 600; // the names of lanes on the critical path
const NAMED = 8; // parts in the legend

/** Options: {title, onPart(lane, part), maxHeight}; data: {seconds, lanes: [{name, short, href, text, parts}], note}. */
export function waterfall(host, options = {}) {
  const joined = joinAxis(options.axis, { continuous: true, from: 0, to: 1e-9, label: "seconds" });
  const { axis } = joined;
  const state = { lanes: [], seconds: 0, row: -1, part: null, names: [] };
  const hooks = onAxis(axis, () => frame, {
    pick: () => state.part && options.onPart?.(state.lanes[state.row], state.part),
    reach: (x, y) => aim(state, frame.box, x, y),
    up: (step) => walk(state, frame, axis, step, 0),
    told: () => spoken(state),
  });
  const chart = {
    ...hooks,
    scrolls: true,
    footHeight: FOOT,
    heavy: () => true,
    blank: () => (state.lanes.length ? null : "No times were recorded for this round."),
    height: () => state.lanes.length * LANE,
    layout: (width, height) => roundBox(width, height, axis, { top: 0, bottom: 0 }),
    paint: (pen, box) => paint(pen, box, state, frame),
    paintFoot: (pen, box) => paintRounds(pen, box, axis, 1),
    paintHover: (pen, box) => paintHover(pen, box, state, axis, hooks),
    rows: (node, box) => rowNames(node, namesOf(state, box)),
    readout: () => (state.part ? `${state.part.name} ${seconds(state.part.seconds)}` : axis.hover === null ? "" : seconds(axis.hover)),
    tip: () => tip(state),
    summary: () => summary(state, options),
    csv: () => csv(state.lanes),
    spot: () => ({ x: frame.box.x(axis.hover ?? 0), y: (state.row + 1) * LANE - frame.box.scroll }),
    key(event) {
      // The steps are parts here: ← and → go from one to the next, not by the second.
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return hooks.key(event);
      walk(state, frame, axis, 0, event.key === "ArrowRight" ? 1 : -1);
      frame.say(spoken(state));
      return true;
    },
  };
  const frame = createFrame(host, "waterfall", { maxHeight: 1e6, ...options, axis }, chart);
  joined.follow(frame);
  return {
    frame,
    update({ seconds: length = 0, lanes = [], note = "" } = {}) {
      const changed = length !== state.seconds;
      Object.assign(state, { lanes, seconds: length, part: null, row: -1 });
      state.names = [...new Set(lanes.flatMap((lane) => lane.parts.map((part) => part.name)))];
      axis.roomForNames(lanes.slice(0, 400).reduce((most, lane) => Math.max(most, textWidth(lane.name, textSize(), BOLD)), 0));
      frame.setNote(note);
      if (changed && length > 0) {
        // Another round has other seconds: nothing of the old view can be kept.
        axis.domain = [0, length];
        axis.view = [0, length];
        axis.empty = false;
        axis.tell("domain");
      }
      frame.fed();
    },
    destroy: () => frame.destroy(),
  };
}

function summary(state, options) {
  const what = `${options.title ?? "Waterfall"}, ${number(state.lanes.length)} nodes in ${seconds(state.seconds)}`;
  return `${what}; critical path ${critical(state) || "not known"}`;
}

function critical(state) {
  const names = new Set(state.lanes.filter((lane) => lane.parts.some((part) => part.critical)).map((lane) => lane.name));
  return [...names].slice(0, 4).join(", ");
}

function sight(state, box) {
  return [Math.floor(box.scroll / LANE), Math.min(state.lanes.length, Math.ceil((box.scroll + box.height) / LANE))];
}

function aim(state, box, x, y) {
  const row = y === null ? -1 : Math.floor((y + box.scroll) / LANE);
  state.row = row >= 0 && row < state.lanes.length ? row : -1;
  state.part = null;
  if (state.row < 0 || x === null) return;
  // A part may be thinner than a pixel: two pixels around it belong to it as well.
  const [from, to] = [box.low + (x - 2 - box.x0) / box.step, box.low + (x + 2 - box.x0) / box.step];
  const under = state.lanes[state.row].parts.filter((part) => part.start <= to && part.start + part.seconds >= from);
  const middle = (from + to) / 2;
  state.part = under.find((part) => part.start <= middle && middle <= part.start + part.seconds) ?? under[0] ?? null;
}

function walk(state, frame, axis, down, along) {
  const before = state.row;
  state.row = Math.max(0, Math.min(state.lanes.length - 1, state.row + down));
  const { parts } = state.lanes[state.row];
  const at = before === state.row && state.part ? parts.indexOf(state.part) + along : 0;
  state.part = parts[Math.max(0, Math.min(parts.length - 1, at))] ?? null;
  if (state.part) axis.setHover(state.part.start + state.part.seconds / 2);
  const { box, dom } = frame;
  const top = state.row * LANE;
  if (top < box.scroll) dom.scroller.scrollTop = top;
  else if (top + LANE > box.scroll + box.height) dom.scroller.scrollTop = top + LANE - box.height;
  frame.rehover();
}

function namesOf(state, box) {
  const [first, last] = sight(state, box);
  return state.lanes.slice(first, last).map((lane, at) => ({
    name: lane.name, short: lane.short && textWidth(lane.name, textSize(), BOLD) > box.x0 - 8 ? lane.short : undefined, href: lane.href, y: (first + at) * LANE - box.scroll, height: LANE, room: box.x0 - 8,
    chosen: lane.parts.some((part) => part.critical),
  }));
}

function paint(pen, box, state, frame) {
  const colours = theme();
  const [first, last] = sight(state, box);
  pen.clip(box.x0 - 1, 0, box.x1 - box.x0 + 2, box.height, (inner) => {
    for (let row = first; row < last; row += 1) {
      const y = row * LANE - box.scroll;
      inner.line(box.x0, y + LANE - 0.5, box.x1, y + LANE - 0.5, { stroke: colours.line, opacity: 0.6 });
      paintLane(inner, box, state.lanes[row], y, colours);
    }
  });
  if (!box.narrow) {
    for (let row = first; row < last; row += 1) {
      const end = state.lanes[row].parts.reduce((late, part) => Math.max(late, part.start + part.seconds), 0);
      const said = state.lanes[row].text ?? seconds(end);
      const room = box.width - box.x1 - 20;
      pen.text(box.x1 + 8, row * LANE - box.scroll + 13, said, { fill: colours.ink2, size: textSize() - 1, room });
    }
  }
  if (box.live) legend(frame.dom.extra, state.names.slice(0, NAMED).map((name) => ({ name, colour: partColour(name, colours) })));
  else paintRowNames(pen, box, namesOf(state, box));
}

function paintLane(pen, box, lane, y, colours) {
  let [pixel, colourThere] = [-Infinity, null];
  const path = []; // of the critical parts: neighbours are merged, or outlines would hide what they outline
  for (const part of lane.parts) {
    const [x0, x1] = [box.x(part.start), box.x(part.start + part.seconds)];
    if (x1 < box.x0 || x0 > box.x1) continue;
    const colour = partColour(part.name, colours);
    // Many short periods of one part in one pixel are one stroke.
    if (x1 < pixel && colour === colourThere && !part.critical) continue;
    const width = Math.max(1, x1 - x0);
    pen.rect(x0, y + 3, width, LANE - 7, { fill: colour });
    if (part.critical && x0 - (path.at(-1)?.[1] ?? -Infinity) < 1.5) path.at(-1)[1] = Math.max(path.at(-1)[1], x1);
    else if (part.critical) path.push([x0, x1]);
    [pixel, colourThere] = [Math.floor(x0) + 1, colour];
  }
  for (const [x0, x1] of path) pen.rect(x0, y + 2.25, Math.max(2, x1 - x0), LANE - 5.5, { stroke: colours.ink, width: 1.5 });
}

function paintHover(pen, box, state, axis, hooks) {
  paintBrush(pen, { ...box, step: 0 }, hooks.brush, 0, box.height);
  paintCrosshair(pen, box, axis, { top: 0, bottom: box.height, number: false });
  if (!state.part) return;
  const colours = theme();
  const { start, seconds: length } = state.part;
  const [x0, x1] = [Math.max(box.x0, box.x(start)), Math.min(box.x1, box.x(start + length))];
  const y = state.row * LANE - box.scroll + 1.5;
  pen.rect(x0 - 0.5, y, Math.max(2, x1 - x0) + 1, LANE - 4, { stroke: colours.accent, width: 2 });
}

function tip(state) {
  const { part } = state;
  if (!part) return null;
  const rows = [
    { colour: partColour(part.name), name: part.name, value: seconds(part.seconds) },
    { name: "from", value: seconds(part.start) },
    { name: "to", value: seconds(part.start + part.seconds) },
  ];
  const foot = [part.critical ? "on the critical path" : "", part.detail ?? ""].filter(Boolean).join(" · ");
  return { head: state.lanes[state.row].name, rows, foot };
}

function spoken(state) {
  const { part } = state;
  if (!part) return "";
  const said = `${state.lanes[state.row].name}, ${part.name}, ${seconds(part.seconds)}, from ${seconds(part.start)}`;
  return part.critical ? `${said}, on the critical path` : said;
}

function* csv(lanes) {
  yield ["node", "part", "start", "seconds", "critical", "detail"];
  for (const lane of lanes) {
    for (const part of lane.parts) yield [lane.name, part.name, part.start, part.seconds, part.critical ? 1 : 0, part.detail];
  }
}
