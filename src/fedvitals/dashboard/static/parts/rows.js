// SPDX-License-Identifier: Apache-2.0
// A plain table whose rows stay in place when their numbers change.

import { fill, h, keyed } from "../dom.js";
import { empty } from "./states.js";

/** columns: [{name, text, num, class, title, sort, cell(row) → text or node}]. `show(rows, {sort, onSort, none})`. */
export function rowTable(columns, { key = (row) => row.node ?? row.name, label, caption } = {}) {
  const head = h("tr", {});
  const body = h("tbody", {});
  const none = h("div", { hidden: true });
  const table = h("table", { class: "data rows" }, caption && h("caption", { class: "unseen", text: caption }), h("thead", {}, head), body);
  // Scrollable content must be reachable without a mouse.
  const box = h("div", { class: "scroll-x", tabindex: "0", role: "region", "aria-label": label ?? caption ?? "table" }, table);
  let told = null;

  function heads(now, { sort, onSort } = {}) {
    const wanted = JSON.stringify([now.map((one) => one.name), sort]);
    if (wanted === told) return;
    told = wanted;
    fill(head, now.map((one) => {
      const here = sort === one.sort ? "descending" : sort === `-${one.sort}` ? "ascending" : null;
      const arrow = here === "descending" ? " ↓" : here === "ascending" ? " ↑" : "";
      return h("th", { scope: "col", class: one.num ? "num" : null, title: one.title, "aria-sort": one.sort ? here : null },
        one.sort && onSort
          ? h("button", { type: "button", text: one.text + arrow, on: { click: () => onSort(here === "descending" ? `-${one.sort}` : one.sort) } })
          : one.text);
    }));
  }

  return {
    node: h("div", {}, box, none),
    show(rows, { sort, onSort, nothing, columns: now = columns } = {}) {
      heads(now, { sort, onSort });
      box.hidden = !rows.length;
      none.hidden = Boolean(rows.length);
      fill(none, !rows.length && nothing && empty(nothing));
      keyed(body, rows, key, () => h("tr", {}), (tr, row) => {
        fill(tr, now.map((one) => h("td", { class: one.num ? "num" : one.class ?? null }, one.cell(row))));
      });
    },
  };
}
