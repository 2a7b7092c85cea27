// SPDX-License-Identifier: Apache-2.0
// The table of clients: sorted on the server, a page at a time, so that ten thousand are as fast as ten.

import { SHAPES } from "../colour.js";
import { fill, h, keyed } from "../dom.js";
import { bytes, exact, number, seconds } from "../format.js";
import { runLink } from "../params.js";
import { labelOf, nameOf } from "./who.js";

export const PAGE = 100; // rows
const WORDS = { critical: "critical", warning: "warning", note: "note" };
const OFTEN = 0.05; // share of its calls from which failures are highlighted
const FAR = 3.5; // deviations from which a score is highlighted; see diagnosis/evidence/outlier_ranking.py

// key of the server's sort, heading, tooltip, whether the largest comes first
const COLUMNS = [
  ["worst", "health", "Its worst finding that is open", false],
  ["name", "client", "Name", false],
  ["group", "group", "Edge, cluster or ring", false],
  ["findings", "findings", "Open findings that name it", true],
  ["attended", "rounds", "Rounds attended, of those in which it was asked", false, true],
  ["last_seen", "last seen", "The round in which it trained or sent last", false, true],
  ["loss", "loss", "Newest loss", true, true],
  ["norm", "update norm", "Size of its newest update", true, true],
  ["cosine", "cosine", "Cosine of its newest update to the mean of the others", false, true],
  ["score", "deviation", "How far it lies from the other clients in the newest rounds, in σ from their median", true, true],
  ["seconds", "time", "Usual length of its round", true, true],
  ["bytes", "bytes", "Sent and received in all rounds", true, true],
  ["failures", "failures", "Times it was asked and nothing of use came", true, true],
];

/** choose(node): the user selects a row; sort(key, descending): a heading. */
export function clientTable(ctx, { choose, sort }) {
  const body = h("tbody", {});
  const heads = COLUMNS.map(([key, text, about, , numeric]) => {
    const button = h("button", { title: about, on: { click: () => turn(key) } }, text, h("span", { "aria-hidden": "true" }));
    return h("th", { scope: "col", class: numeric ? "num" : null, data: { key } }, button);
  });
  const table = h("table", { class: "data clients-table" },
    h("caption", { class: "unseen", text: "Clients" }), h("thead", {}, h("tr", {}, heads)), body);
  let now = { sort: "worst", descending: false };

  function turn(key) {
    const natural = COLUMNS.find(([name]) => name === key)[3];
    sort(key, now.sort === key ? !now.descending : natural);
  }

  return {
    node: h("div", { class: "scroll-x" }, table),
    show(page, order, chosen) {
      now = order;
      for (const head of heads) {
        const mine = head.dataset.key === order.sort;
        if (mine) head.setAttribute("aria-sort", order.descending ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
        head.querySelector("span").textContent = mine ? (order.descending ? " ↓" : " ↑") : "";
      }
      table.classList.toggle("no-groups", !page.groups.length);
      keyed(body, page.rows, (row) => row.name, (row) => line(row, choose), (node, row) => update(node, ctx.run, row, chosen));
    },
  };
}

function line(row, choose) {
  return h("tr", {
    on: {
      click: (event) => {
        if (!event.target.closest("a")) choose(row.name);
      },
    },
  });
}

function update(node, run, row, chosen) {
  node.setAttribute("aria-selected", String(row.name === chosen));
  const now = JSON.stringify(row);
  if (node.dataset.now === now) return;
  node.dataset.now = now;
  const odd = (name, text, value) =>
    row.odd.includes(name)
      ? h("td", { class: "num sev-critical", text: "NaN" })
      : h("td", { class: "num", text, title: value === null ? null : exact(value) });
  fill(node,
    h("td", { class: "nowrap" }, health(row)),
    h("td", {}, h("a", { class: "name", href: runLink(run, "clients", row.name) }, nameOf(row.name)), labelOf(row.label)),
    h("td", { class: "group-cell" }, row.group ?? ""),
    h("td", { class: "cases" }, row.cases.map((one) => h("a", {
      class: `chip sev-${one.severity}`, href: runLink(run, "findings", one.key),
      title: `${one.title}${one.since === null ? "" : `, since round ${one.since}`}`,
      text: `${SHAPES[one.severity] ?? "·"} ${one.title}`,
    })), row.open_cases > row.cases.length && h("span", { class: "muted small", text: ` +${row.open_cases - row.cases.length}` })),
    h("td", { class: "num" }, number(row.attended), h("span", { class: "muted", text: ` / ${number(row.sampled)}` })),
    h("td", { class: "num" }, row.last_seen === null ? "–"
      : h("a", { href: `${runLink(run, "rounds", String(row.last_seen))}`, text: `r${row.last_seen}` })),
    odd("loss", number(row.loss), row.loss),
    odd("norm", number(row.norm), row.norm),
    odd("cosine", number(row.cosine), row.cosine),
    score(row),
    h("td", { class: "num", text: seconds(row.seconds), title: row.seconds === null ? null : `${exact(row.seconds)} s` }),
    h("td", { class: "num", text: bytes(row.bytes), title: row.bytes === null ? null : `${exact(row.bytes)} bytes` }),
    h("td", { class: `num ${row.failures > OFTEN * row.sampled ? "sev-warning" : "muted"}`, text: number(row.failures), title: row.trouble || null }));
}

function health(row) {
  if (row.severity === null) return h("span", { class: "muted", text: "no finding" }); // not «well»: the run may not have been judged in full
  return h("span", { class: `sev-${row.severity}` },
    h("span", { "aria-hidden": "true", text: `${SHAPES[row.severity] ?? "·"} ` }), WORDS[row.severity] ?? row.severity,
    h("span", { class: "muted small", text: ` ${row.cases[0]?.sure ?? ""}` }));
}

function score(row) {
  if (row.broken) return h("td", { class: "num sev-critical", text: "not finite", title: row.why });
  const far = row.score !== null && row.score >= FAR;
  return h("td", { class: `num ${far ? "far" : ""}`, title: row.score === null ? row.why : `${exact(row.score)}: ${row.why}`, text: number(row.score) });
}
