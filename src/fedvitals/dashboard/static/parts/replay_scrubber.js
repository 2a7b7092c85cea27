// SPDX-License-Identifier: Apache-2.0
// All rounds of a tape in one strip: what is stored of each, findings above, failures below; drag or ← → to select.

import { fill, h, s } from "../dom.js";
import { SHAPES } from "../colour.js";
import { gesture } from "../gesture.js";
import { number } from "../format.js";

const HEIGHT = { flags: 18, tape: 26, failures: 13, ticks: 13 };
const APART = 56; // pixels between two numbers of rounds
const NEAR = 9; // pixels between two flags below which only the worse is drawn
const RANK = { critical: 3, warning: 2, note: 1 };
const KINDS = {
  whole: "whole state", again: "run again from the state before", digests: "digests only", damaged: "damaged",
};
const PART = { whole: 1, again: 0.5, digests: 0.16, damaged: 1 }; // of the height: never colour alone

/** `choose(round, push)` is called while dragging; `show(index, round)` draws. */
export function scrubber(choose) {
  const strip = h("div", {
    class: "scrub", tabindex: 0, role: "slider", "aria-label": "Round", "aria-orientation": "horizontal",
  });
  const legend = h("p", { class: "scrub-legend small muted" });
  const node = h("div", { class: "scrubber" }, strip, legend);
  const begins = gesture();
  let [index, at, width, held] = [null, 0, 0, false];

  const column = () => width / Math.max(1, index.rounds.length);
  const pick = (place) => {
    const next = Math.max(0, Math.min(index.rounds.length - 1, place));
    if (next === at) return;
    at = next;
    cursor();
    choose(index.rounds[at], begins());
  };
  const under = (event) => Math.floor((event.clientX - strip.getBoundingClientRect().left) / column());
  strip.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    held = true;
    strip.setPointerCapture(event.pointerId);
    pick(under(event));
  });
  strip.addEventListener("pointermove", (event) => held && pick(under(event)));
  for (const name of ["pointerup", "pointercancel"]) strip.addEventListener(name, () => (held = false));
  strip.addEventListener("keydown", (event) => {
    const to = { Home: 0, End: index.rounds.length - 1, PageUp: at - 10, PageDown: at + 10 }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    pick(to);
  });
  const sized = new ResizeObserver(() => {
    if (index && Math.abs(strip.clientWidth - width) > 0.5) draw();
  });
  sized.observe(strip);

  function cursor() {
    const line = strip.querySelector(".scrub-cursor");
    if (line) line.setAttribute("transform", `translate(${(at + 0.5) * column()} 0)`);
    const [round, kind] = [index.rounds[at], index.kinds[at]];
    strip.setAttribute("aria-valuemin", index.rounds[0]);
    strip.setAttribute("aria-valuemax", index.rounds.at(-1));
    strip.setAttribute("aria-valuenow", round);
    strip.setAttribute("aria-valuetext", `round ${round}, ${words(index, at)}${kind === "damaged" ? "" : `, ${index.answers[at]} answers`}`);
  }

  function draw() {
    width = strip.clientWidth;
    if (!width) return;
    const [whole, size] = [Object.values(HEIGHT).reduce((sum, one) => sum + one), column()];
    const gap = size > 6 ? 2 : size > 3 ? 1 : 0;
    const bars = Object.keys(KINDS).map((kind) => s("path", { class: `scrub-${kind}`, d: path(kind, size, gap) }));
    const current = s("g", { class: "scrub-cursor" },
      s("rect", { x: -Math.max(2, size / 2), y: HEIGHT.flags - 3, width: Math.max(4, size), height: HEIGHT.tape + 6, rx: 2 }),
      s("line", { x1: 0, x2: 0, y1: HEIGHT.flags + HEIGHT.tape + 3, y2: HEIGHT.flags + HEIGHT.tape + HEIGHT.failures }));
    fill(strip, s("svg", { width, height: whole, "aria-hidden": "true" },
      s("line", { class: "scrub-base", x1: 0, x2: width, y1: HEIGHT.flags + HEIGHT.tape + 0.5, y2: HEIGHT.flags + HEIGHT.tape + 0.5 }),
      bars, flags(size), failures(size), ticks(size, whole), current));
    cursor();
  }

  function path(kind, size, gap) {
    const tall = HEIGHT.tape * PART[kind];
    const top = HEIGHT.flags + HEIGHT.tape - tall;
    const wide = Math.max(0.5, size - gap);
    return index.kinds.reduce((text, one, i) => (one === kind ? `${text}M${tenth(i * size + gap / 2)} ${tenth(top)}h${tenth(wide)}v${tenth(tall)}h${tenth(-wide)}z` : text), "");
  }

  function flags(size) {
    const places = new Map(index.rounds.map((round, i) => [round, i]));
    const shown = [];
    for (const one of index.flags) {
      if (!places.has(one.round)) continue;
      const x = (places.get(one.round) + 0.5) * size;
      const last = shown.at(-1);
      if (!last || x - last.x >= NEAR) shown.push({ x, one });
      else if ((RANK[one.severity] ?? 0) > (RANK[last.one.severity] ?? 0)) last.one = one;
    }
    return shown.map(({ x, one }) => s("text", { class: `scrub-flag sev-${one.severity}`, x, y: HEIGHT.flags - 6, "text-anchor": "middle" },
      SHAPES[one.severity] ?? SHAPES.note, s("title", { text: `round ${one.round}: ${one.words}${one.count > 1 ? `, and ${one.count - 1} more` : ""}` })));
  }

  function ticks(size, whole) {
    const every = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((one) => one * size >= APART) ?? 10_000;
    return index.rounds.map((round, i) => (round % every ? null : s("text", { class: "scrub-tick", x: tenth((i + 0.5) * size), y: whole - 2, "text-anchor": "middle", text: round })));
  }

  function failures(size) {
    let last = -Infinity;
    return index.failed.map((count, i) => {
      const x = (i + 0.5) * size;
      if (!count || x - last < NEAR) return null;
      last = x;
      return s("text", { class: "scrub-failure", x, y: HEIGHT.flags + HEIGHT.tape + HEIGHT.failures - 1, "text-anchor": "middle" }, "✕", s("title", { text: `round ${index.rounds[i]}: ${number(count)} failed` }));
    });
  }

  return {
    node,
    step: (by) => pick(at + by),
    /** The next round with a finding or a failure, in that direction. */
    trouble(by) {
      const flagged = new Set(index.flags.map((one) => one.round));
      for (let i = at + by; i >= 0 && i < index.rounds.length; i += by) {
        if (flagged.has(index.rounds[i]) || index.failed[i]) return pick(i);
      }
      return null;
    },
    show(found, round) {
      index = found;
      if (!held) at = Math.max(0, index.rounds.indexOf(round));
      draw();
      const there = new Set(index.kinds);
      fill(legend,
        Object.entries(KINDS).filter(([kind]) => there.has(kind)).map(([kind, text]) => h("span", {}, swatch(kind), text)),
        index.flags.length > 0 && h("span", {}, h("span", { "aria-hidden": "true", text: "■ ▲ · " }), "findings"),
        index.failed.some(Boolean) && h("span", {}, h("span", { "aria-hidden": "true", text: "✕ " }), "clients failed"),
        h("span", {}, h("kbd", { text: "←" }), " ", h("kbd", { text: "→" }), " one round, ", h("kbd", { text: "n" }), " ", h("kbd", { text: "b" }), " next and last trouble"));
    },
    destroy: () => sized.disconnect(),
  };
}

/** The content of the tape for one round, in words. */
export function words(index, at) {
  if (index.kinds[at] === "again") return index.since[at] ? `run again from round ${index.since[at]}` : "run again from the beginning";
  return KINDS[index.kinds[at]];
}

const tenth = (value) => Math.round(value * 10) / 10;

function swatch(kind) {
  const tall = 12 * PART[kind];
  return s("svg", { class: "scrub-swatch", width: 8, height: 12, "aria-hidden": "true" }, s("path", { class: `scrub-${kind}`, d: `M0 ${12 - tall}h8v${tall}h-8z` }));
}
