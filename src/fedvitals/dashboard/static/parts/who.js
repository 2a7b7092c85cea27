// SPDX-License-Identifier: Apache-2.0
// A node's name as people read it: a number of twenty digits without its middle, and beside it what it is called.

import { h } from "../dom.js";

const LONG = /^\d{12,}$/; // as views/labels.py has it
const TAIL = 6;

/** Its name. The middle of a long number is only out of sight: it is copied whole, and told when one waits over it. */
export function nameOf(node) {
  if (!LONG.test(node)) return node;
  return h("span", { class: "long-id", title: node }, h("span", { text: node.slice(0, -TAIL) }), node.slice(-TAIL));
}

/** The last digits of a long number, «…474769», where there is no room for more; any other name as it is. */
export function shortId(node) {
  return LONG.test(node) ? `…${node.slice(-TAIL)}` : node;
}

/** «partition 3», muted; nothing where it has no label. */
export function labelOf(label) {
  return label ? [" ", h("span", { class: "muted small nowrap", text: label })] : null;
}
