// SPDX-License-Identifier: Apache-2.0
// Names beside the visible rows, as real links: usable by eye, tab key and screen reader alike.

import { h, keyed } from "../dom.js";
import { theme } from "../colour.js";
import { fitted, textSize, textWidth } from "./pen.js";

/** Names without the first words that all those share that are longer than their room: «…layers.3.weight», as in views/short_ids.py. */
export function differingNames(names, roomOf) {
  const long = new Set(names.filter((name, at) => textWidth(name) > roomOf(at)));
  const [first] = long;
  if (long.size < 2) return names;
  let shared = 0;
  while ([...long].every((name) => shared < name.length && name[shared] === first[shared])) shared += 1;
  const words = first.slice(0, shared).search(/[^\p{L}\p{N}][\p{L}\p{N}]*$/u) + 1;
  return words > 1 ? names.map((name) => (long.has(name) ? `…${name.slice(words)}` : name)) : names;
}

function differing(rows) {
  const short = differingNames(rows.map((row) => row.name), (at) => rows[at].room);
  return rows.map((row, at) => (short[at] === row.name ? row : { ...row, short: short[at] }));
}

/** rows: [{name, y, height, href, chosen, room}]; only visible ones are nodes. */
export function rowNames(parent, rows) {
  // The link is part of the key, so that every address passes the check in `h`.
  keyed(parent, differing(rows), (row) => `${row.href ?? ""} ${row.name}`, make, update);
}

/** The same names in a saved picture. */
export function paintRowNames(pen, box, rows) {
  for (const row of differing(rows)) {
    pen.text(box.x0 - 8, row.y + row.height / 2 + 4, row.short ?? row.name, { fill: theme().ink2, anchor: "end", room: box.x0 - 12 });
  }
}

function make(row) {
  return h(row.href ? "a" : "span", { href: row.href });
}

function update(node, row) {
  const short = fitted(row.short ?? row.name, row.room, textSize(), row.chosen ? 600 : 400);
  if (node.textContent !== short) node.textContent = short;
  if (node.title !== row.name) node.title = row.name;
  node.classList.toggle("chosen", Boolean(row.chosen));
  const { style } = node;
  style.top = `${row.y}px`;
  style.width = `${row.room}px`;
  style.height = style.lineHeight = `${row.height}px`;
  if (row.left !== undefined) style.left = `${row.left}px`;
}
