// SPDX-License-Identifier: Apache-2.0
// Names at the ends of lines instead of a legend; if they do not fit, a legend in the heading.

import { fill, h } from "../dom.js";
import { readable, theme } from "../colour.js";
import { fitted, textSize, textWidth } from "./pen.js";
import { swatch } from "./tip.js";

const line = () => textSize() + 2; // height of a label in pixels
const LEGEND = 260; // maximum width of a name in a legend, in pixels
const NEAR = 12; // pixels from the right end within which a line gets a leader to its name

/** Moves labels apart so that none covers another and none leaves [top, bottom]; keeps their order. */
export function spread(labels, top, bottom) {
  const sorted = [...labels].sort((a, b) => a.y - b.y);
  let floor = top;
  for (const label of sorted) {
    label.at = Math.max(floor, label.y);
    floor = label.at + line();
  }
  let ceiling = bottom;
  for (const label of sorted.reverse()) {
    label.at = Math.min(ceiling, label.at);
    ceiling = label.at - line();
  }
  return labels;
}

/** Width of the longest of these names in pixels. */
export function widest(names) {
  return names.slice(0, 40).reduce((most, name) => Math.max(most, textWidth(String(name ?? ""))), 0);
}

/** Whether that many names fit at the right of a box. */
export function roomFor(count, box) {
  return !box.narrow && count > 0 && count * line() <= box.y1 - box.y0;
}

/** labels: [{name, y, colour, href, faint}]. */
export function paintEndLabels(pen, box, labels) {
  const colours = theme();
  for (const label of spread(labels, box.y0 + 4, box.y1)) {
    const end = label.x ?? box.x1;
    const early = end < box.x1 - NEAR; // a leader across empty rounds would look like values
    const x = (early ? end : box.x1) + 8;
    if (Math.abs(label.at - label.y) > 3 && !early) {
      pen.path([[end + 2, label.y, x - 2, label.at]], { stroke: label.colour, width: 0.75, opacity: 0.7 });
    }
    pen.link(label.href, (inner) => {
      inner.text(x, label.at + 4, label.name, {
        fill: label.faint ? colours.ink2 : readable(label.colour, colours), room: box.width - x - 2, halo: early ? colours.paper : undefined,
      });
    });
  }
}

/** A legend in the heading: [{name, colour, href}]; none removes it. */
export function legend(node, entries) {
  const key = entries.map((entry) => `${entry.colour} ${entry.name} ${entry.href ?? ""}`).join("\n");
  if (node.legendKey === key) return;
  node.legendKey = key;
  node.painted = { entries };
  fill(node, entries.map((entry) => h(entry.href ? "a" : "span", { class: "chart-legend", href: entry.href }, swatch(entry), fitted(entry.name, LEGEND))));
}
