// SPDX-License-Identifier: Apache-2.0
// A node's name for users: a number of twenty digits without its middle, and its label beside it.

import { h } from "../dom.js";

const LONG = /^\d{12,}$/; // as in views/labels.py
const TAIL = 6;

/** Its name. The middle of a long number is only hidden: it is copied whole, and shown in the tooltip. */
export function nameOf(node) {
  if (!LONG.test(node)) return node;
  return h("span", { class: "long-id", title: node }, h("span", { text: node.slice(0, -TAIL) }), node.slice(-TAIL));
}

/** The last digits of a long number, «…474769», if there is no room for more; any other name unchanged. */
export function shortId(node) {
  return LONG.test(node) ? `…${node.slice(-TAIL)}` : node;
}

/** «partition 3», muted; nothing without a label. */
export function labelOf(label) {
  return label ? [" ", h("span", { class: "muted small nowrap", text: label })] : null;
}
