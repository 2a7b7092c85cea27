// SPDX-License-Identifier: Apache-2.0
// The page's single tooltip: exact values beside the pointer. Built of text nodes, placed without measuring.

import { fill, h } from "../dom.js";
import { severityColour, severityRank, SHAPES } from "../colour.js";

const AWAY = 14; // pixels from the pointer
let node = null;
let owner = null;

/** Content: {head, rows: [{name, value, colour?, shape?}], foot}. */
export function showTip(who, clientX, clientY, said) {
  if (!said) return hideTip(who);
  if (!node) {
    // Screen readers get the announcer; a second voice would say everything twice.
    node = h("div", { class: "chart-tip", "aria-hidden": "true" });
  }
  if (!node.isConnected) document.body.append(node);
  owner = who;
  fill(node, said.head ? h("div", { class: "chart-tip-head", text: said.head }) : null, said.rows?.length ? rows(said.rows) : null,
    said.foot ? h("div", { class: "chart-tip-foot", text: said.foot }) : null);
  place(clientX, clientY);
  node.hidden = false;
}

function rows(list) {
  return h("div", { class: "chart-tip-rows" }, list.slice(0, 14).map((row) => [
    swatch(row),
    h("span", { class: "chart-tip-name", text: row.name }),
    h("span", { class: "chart-tip-value", text: row.value }),
  ]));
}

/** The row that shows a severity, by its shape and its word; none without one. */
export function severityRow(severity) {
  if (!severityRank(severity)) return [];
  return [{ shape: SHAPES[severity], colour: severityColour(severity), name: severity, value: "" }];
}

/** «in trouble: c7, c3», for a summary. */
export function troubled(names) {
  return names.length ? `in trouble: ${names.slice(0, 5).join(", ")}` : "none in trouble";
}

/** A sample of a colour, or a shape in it. */
export function swatch({ colour, shape }) {
  const mark = h("span", { class: shape ? "chart-swatch chart-swatch-shape" : "chart-swatch", "aria-hidden": "true", text: shape ?? "" });
  if (colour && shape) mark.style.color = colour;
  else if (colour) mark.style.background = colour;
  return mark;
}

function place(x, y) {
  const [width, height] = [document.documentElement.clientWidth, window.innerHeight];
  const [leftwards, upwards] = [x > width / 2, y > height / 2];
  Object.assign(node.style, {
    left: leftwards ? "auto" : `${Math.max(4, x + AWAY)}px`,
    right: leftwards ? `${Math.max(4, width - x + AWAY)}px` : "auto",
    top: upwards ? "auto" : `${Math.max(4, y + AWAY)}px`,
    bottom: upwards ? `${Math.max(4, height - y + AWAY)}px` : "auto",
  });
}

export function hideTip(who) {
  if (node && owner === who) {
    node.hidden = true;
    owner = null;
  }
}
