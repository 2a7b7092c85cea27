// SPDX-License-Identifier: Apache-2.0
// The key to a colour map, in a chart's heading: a strip of it with the values at its ends.

import { fill, h } from "../dom.js";
import { colourTable, theme } from "../colour.js";
import { brief, withUnit } from "../format.js";

/** scale: {low, high, kind, log}; `smallest` and `largest` show values beyond the ends. */
export function colourStrip(node, scale, { unit, smallest, largest } = {}) {
  const [low, high] = scale.signed ? ends(scale) : [scale.low, scale.high];
  const under = smallest !== null && smallest !== undefined && smallest < low ? "≤ " : "";
  const over = largest !== null && largest !== undefined && largest > high ? "≥ " : "";
  const key = [scale.kind, low, high, under, over, unit, theme().dark].join(" ");
  if (node.stripKey === key) return;
  node.stripKey = key;
  node.painted = { strip: strip(scale.kind), from: under + least(low, unit), to: over + withUnit(high, unit) + (scale.log ? ", log colours" : "") };
  fill(node, h("span", { class: "chart-strip" },
    h("span", { text: under + least(low, unit) }), strip(scale.kind), h("span", { text: over + withUnit(high, unit) }),
    scale.log ? h("span", { text: "log colours" }) : null));
}

/** As the other end is written, which also says the unit where it is a word. */
const least = (low, unit) => (low === 0 ? "0" : brief(low, unit));

function ends({ low, high }) {
  const reach = Math.max(Math.abs(low), Math.abs(high)) || 1;
  return [-reach, reach];
}

function strip(kind) {
  const canvas = h("canvas", { width: 256, height: 1, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const image = context.createImageData(256, 1);
  const table = colourTable(kind);
  for (let at = 0; at < 256; at += 1) {
    for (let band = 0; band < 3; band += 1) image.data[at * 4 + band] = table[at * 3 + band];
    image.data[at * 4 + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
