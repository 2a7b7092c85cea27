// SPDX-License-Identifier: Apache-2.0
// A chart's «⋯» menu: formats to save it in, and resetting the zoom.

import { h } from "../dom.js";
import { popup } from "../popup.js";
import { saveCsv, savePng, saveSvg } from "./download.js";

function entries(frame) {
  const { axis } = frame.options;
  const found = [];
  if (frame.box) found.push(["Save as SVG", () => saveSvg(frame)], ["Save as PNG", () => savePng(frame)]);
  if (frame.chart.csv) found.push(["Save values as CSV", () => saveCsv(frame)]);
  if (axis && !axis.whole) found.push([axis.continuous ? "Show everything" : "Show all rounds", () => axis.reset()]);
  return found;
}

/** Puts the button into the heading. */
export function attachMenu(frame) {
  const button = h("button", { type: "button", class: "chart-menu-button", "aria-label": `Menu of the chart ${frame.title}`, title: "Save this chart", text: "⋯" });
  const close = popup(button, frame.dom.head, { label: `Chart ${frame.title}`, entries: () => entries(frame), signal: frame.signal });
  frame.signal.addEventListener("abort", () => close(false));
  frame.dom.head.append(button);
}
