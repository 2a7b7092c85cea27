// SPDX-License-Identifier: Apache-2.0
// The «⋯» of a chart: what it can be saved as, and the way back from a zoom.

import { h } from "../dom.js";
import { saveCsv, savePng, saveSvg } from "./download.js";

function entries(frame) {
  const { axis } = frame.options;
  const found = [];
  if (frame.box) found.push(["Save as SVG", () => saveSvg(frame)], ["Save as PNG", () => savePng(frame)]);
  if (frame.chart.csv) found.push(["Save values as CSV", () => saveCsv(frame)]);
  if (axis && !axis.whole) found.push([axis.continuous ? "Show everything" : "Show all rounds", () => axis.reset()]);
  return found;
}

/** Puts the button into the heading; the menu itself lives only while it is open. */
export function attachMenu(frame) {
  let menu = null;
  const button = h("button", {
    type: "button", class: "chart-menu-button", "aria-haspopup": "menu", "aria-expanded": "false",
    "aria-label": `Menu of the chart ${frame.title}`, title: "Save this chart", text: "⋯",
  });

  const outside = (event) => {
    if (!menu.contains(event.target) && event.target !== button) close(false);
  };
  function close(back = true) {
    if (!menu) return;
    document.removeEventListener("pointerdown", outside, true);
    menu.remove();
    menu = null;
    button.setAttribute("aria-expanded", "false");
    if (back) button.focus();
  }
  function open() {
    const items = entries(frame).map(([text, work]) =>
      h("button", { type: "button", role: "menuitem", tabindex: -1, text, on: { click: () => { close(); work(); } } }));
    menu = h("div", { class: "chart-menu", role: "menu", "aria-label": `Chart ${frame.title}` }, items);
    menu.addEventListener("keydown", (event) => walk(event, items, close));
    frame.dom.head.append(menu);
    button.setAttribute("aria-expanded", "true");
    document.addEventListener("pointerdown", outside, true);
    items[0]?.focus();
  }

  button.addEventListener("click", () => (menu ? close() : open()), { signal: frame.signal });
  frame.signal.addEventListener("abort", () => close(false));
  frame.dom.head.append(button);
}

function walk(event, items, close) {
  const at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (to !== undefined) items[(to + items.length) % items.length].focus();
  else if (event.key === "Escape" || event.key === "Tab") close(event.key === "Escape");
  else return;
  if (event.key !== "Tab") event.preventDefault();
  event.stopPropagation();
}
