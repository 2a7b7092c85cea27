// SPDX-License-Identifier: Apache-2.0
// What would make the rounds shorter: remedies with their costs, and the what-if table.

import { fill, h } from "../dom.js";
import { percent, seconds } from "../format.js";
import { rowTable } from "./rows.js";
import { empty } from "./states.js";

export function changePanels() {
  const trouble = h("div", {});
  const remedies = rowTable([
    { name: "name", text: "what", class: "words", cell: (row) => [h("div", { text: row.name }), row.why && h("div", { class: "small muted", text: row.why })] },
    { name: "after", text: "a round", num: true, cell: (row) => seconds(row.after) },
    { name: "share", text: "gain", num: true, cell: (row) => `${row.at_most ? "up to " : ""}${percent(row.share)}` },
    { name: "costs", text: "what it costs", class: "words", cell: (row) => h("span", { class: "small muted", text: row.costs }) },
  ], { caption: "Remedies" });
  const what = rowTable([
    { name: "name", text: "what if", class: "words", cell: (row) => h("span", { text: row.name, title: row.assumes }) },
    { name: "after", text: "a round", num: true, cell: (row) => seconds(row.after) },
    { name: "bar", text: "", class: "wide", cell: (row) => h("div", { class: "bar", title: seconds(row.after) }, h("span", { style: { width: `${(100 * row.after) / row.before}%` } })) },
    { name: "share", text: "gain", num: true, cell: (row) => (row.share ? `${row.at_most ? "up to " : ""}${percent(row.share)}` : "") },
  ], { caption: "What other settings would have given" });
  const assumed = h("p", { class: "small muted" });
  const node = h("div", { class: "split" },
    h("section", { class: "panel" }, h("h2", { text: "what would help" }), trouble, remedies.node),
    h("section", { class: "panel" }, h("h2", { text: "what if: mean seconds of a round" }), what.node, assumed));

  return {
    node,

    show(found) {
      fill(trouble);
      remedies.show(found.remedies, { nothing: "Nothing that keeps most of the data gains 2 % of a round." });
      assumed.textContent = found.what_if.length
        ? "Computed from the recorded times; each row changes one thing. What it costs in accuracy, only a re-run tells."
        : "Nothing that was computed gains 2 % of a round.";
      const before = { name: "as it was", assumes: "", after: found.before, before: found.before, share: 0 };
      what.show(found.what_if.length ? [before, ...found.what_if] : []);
    },

    fail(error) {
      fill(trouble, empty("This part could not be drawn.", error.message));
    },
  };
}
